"""GPT-2, as transformers computes it, in layers: embedding, blocks, head.

The head has a weight of its own at every number of stages, one included. GPT-2 ties it to the token embedding, but the
two stand at opposite ends of the pipeline: tied, every step would have to ship the gradient of the whole vocabulary
matrix between them, 154 MB for GPT-2 small, which no compression of activations makes smaller. Untied at one stage as
well, the model is the same whatever the cut. Names are those of `GPT2LMHeadModel` with `tie_word_embeddings=False`.

Tensor names end in their shape: B samples, T tokens, C channels (n_embd), V vocabulary.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thinwire.models.errors import require
from thinwire.models.layers import Blueprint, Layer, LayerSpec

if TYPE_CHECKING:
    from transformers import GPT2Config

_INITIAL_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class GPT2Options:
    """The size of a GPT-2; GPT-2 small is vocab_size=50257, n_layer=12, n_embd=768, n_head=12, n_positions=1024."""

    vocab_size: int = 256
    """The number of token ids; 256 is enough for bytes."""
    n_layer: int = 4
    """The number of transformer blocks."""
    n_embd: int = 192
    """The channels of the hidden state, a multiple of n_head."""
    n_head: int = 6
    """The attention heads of each block."""
    n_positions: int = 128
    """The longest block of tokens the model can read."""
    dropout: float = 0.0
    """The probability of dropping a value, after the embedding, in the attention and on the residual paths alike."""

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "n_layer", "n_embd", "n_head", "n_positions")
        require(
            *((getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}") for name in sizes),
            (
                self.n_head < 1 or self.n_embd % self.n_head == 0,
                f"n_embd must be a multiple of n_head, got {self.n_embd} and {self.n_head}",
            ),
            (0 <= self.dropout < 1, f"dropout must lie in [0, 1), got {self.dropout}"),
        )


def gpt2(options: GPT2Options) -> Blueprint:
    """Return the model: token ids [B, T] in, logits [B, T, V] out, cut anywhere between its n_layer + 2 layers.

    Costs are the multiplications of one token's forward pass.
    """
    n_embd, n_positions = options.n_embd, options.n_positions
    blocks = (
        LayerSpec(f"block {index}", partial(Block, options, index), 12.0 * n_embd**2 + 2.0 * n_positions * n_embd)
        for index in range(options.n_layer)
    )
    return Blueprint(
        layers=(
            LayerSpec("embedding", partial(Embedding, options), float(n_embd)),
            *blocks,
            LayerSpec("head", partial(Head, options), float(n_embd) * options.vocab_size),
        ),
        initialize=partial(_initialize, options.n_layer),
    )


class Embedding(Layer):
    """Token ids [B, T] to hidden states [B, T, C]: token and position embeddings, summed, then dropout."""

    def __init__(self, options: GPT2Options) -> None:
        super().__init__()
        self.wte = nn.Embedding(options.vocab_size, options.n_embd)
        self.wpe = nn.Embedding(options.n_positions, options.n_embd)
        self.drop = nn.Dropout(options.dropout)
        self.parts = {f"transformer.{name}": module for name, module in self.named_children()}

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return the first hidden states, [B, T, C]."""
        length, longest = ids_BT.shape[1], self.wpe.num_embeddings
        require((length <= longest, f"n_positions must be at least the block's {length} tokens, got {longest}"))
        positions_T = torch.arange(length, device=ids_BT.device)
        hidden_BTC: Tensor = self.drop(self.wte(ids_BT) + self.wpe(positions_T))
        return hidden_BTC


class Block(Layer):
    """One transformer block: hidden states [B, T, C] to hidden states [B, T, C], each token seeing those before it."""

    def __init__(self, options: GPT2Options, index: int) -> None:
        # Importing transformers' model code takes seconds, which only building a model may cost.
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block

        super().__init__()
        make_block: Any = GPT2Block
        self.block: nn.Module = make_block(_config(options), layer_idx=index)
        self.parts = {f"transformer.h.{index}": self.block}

    def forward(self, hidden_BTC: Tensor) -> Tensor:
        """Return the next hidden states, [B, T, C]."""
        result = self.block(hidden_BTC)
        # transformers 5.0 returns a tuple of one tensor, later releases the tensor
        next_BTC: Tensor = result[0] if isinstance(result, tuple) else result
        return next_BTC


class Head(Layer):
    """Hidden states [B, T, C] to logits [B, T, V], with a weight of its own."""

    def __init__(self, options: GPT2Options) -> None:
        super().__init__()
        self.ln_f = nn.LayerNorm(options.n_embd, eps=_config(options).layer_norm_epsilon)
        self.lm_head = nn.Linear(options.n_embd, options.vocab_size, bias=False)
        self.parts = {"transformer.ln_f": self.ln_f, "lm_head": self.lm_head}

    def forward(self, hidden_BTC: Tensor) -> Tensor:
        """Return the logits, [B, T, V]."""
        logits_BTV: Tensor = self.lm_head(self.ln_f(hidden_BTC))
        return logits_BTV


def _config(options: GPT2Options) -> "GPT2Config":
    from transformers import GPT2Config

    fields: dict[str, Any] = {
        "vocab_size": options.vocab_size,
        "n_layer": options.n_layer,
        "n_embd": options.n_embd,
        "n_head": options.n_head,
        "n_positions": options.n_positions,
        "embd_pdrop": options.dropout,
        "attn_pdrop": options.dropout,
        "resid_pdrop": options.dropout,
        # given no mask, this attention is causal
        "attn_implementation": "sdpa",
        "tie_word_embeddings": False,
        "use_cache": False,
        # transformers warns where its defaults lie beyond the vocabulary
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return GPT2Config(**fields)


def _initialize(n_layer: int, full_name: str, module: nn.Module) -> None:
    """Fill one module as the GPT-2 paper does: weights that end a residual path start smaller by sqrt(2 * n_layer).

    Not left to transformers, whose own initialisation changed between releases: 5.0 forgets the smaller ones.
    """
    if not any(True for _ in module.parameters(recurse=False)):
        return
    weight, bias = module.get_parameter("weight"), getattr(module, "bias", None)
    if isinstance(module, nn.LayerNorm):
        nn.init.ones_(weight)
    else:
        residual = full_name.endswith(".c_proj")
        nn.init.normal_(weight, std=_INITIAL_STD / math.sqrt(2 * n_layer) if residual else _INITIAL_STD)
    if bias is not None:
        nn.init.zeros_(bias)
