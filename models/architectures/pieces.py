"""The layers of transformers' language models and classifiers, made of the library's own modules.

Only the hidden state crosses a boundary. The positions, rotary angles and masks of a block depend on no activation: the
block's stage computes them, or reads them as side inputs.

Tensor names end in their shape: B samples, T tokens, C channels.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.models.errors import ModelError
from thinwire.models.layers import Layer

ChainStep = str | Callable[[Tensor, Any], Tensor]
"""The full name of a module, or a function of the hidden state and the model's configuration."""


class Skeleton:
    """A whole model of transformers without its weights; layers copy their modules from it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config

    def get(self, full_name: str) -> Any:
        """One module of the model. ModelError if there is none of this name."""
        try:
            return self.model.get_submodule(full_name)
        except AttributeError as error:
            raise ModelError(
                f"{type(self.model).__name__} must have a part {full_name!r}, {self._near(full_name)}"
            ) from error

    def has(self, full_name: str) -> bool:
        """Whether the model has a module of this name: some are None in some configurations."""
        path, _, name = full_name.rpartition(".")
        return getattr(self.get(path), name, None) is not None

    def copy(self, full_name: str, **replaced: nn.Module) -> Any:
        """A copy of one module with the children in `replaced`; the configuration is not copied."""
        module = self.get(full_name)
        memo = {id(getattr(module, name)): child for name, child in replaced.items()}
        return copy.deepcopy(module, {id(self.config): self.config, **memo})

    def _near(self, full_name: str) -> str:
        """The parts of the innermost module on the way to a name that does not exist."""
        module = self.model
        path: list[str] = []
        for name in full_name.split("."):
            inner = getattr(module, name, None)
            if not isinstance(inner, nn.Module):
                break
            module, path = inner, [*path, name]
        parts = ", ".join(name for name, _ in module.named_children())
        return f"the parts of {'.'.join(path)} are {parts}" if path else f"its parts are {parts}"


class CopiedChain(Layer):
    """Copied modules and functions one after another: token ids to a hidden state, or a hidden state to logits."""

    def __init__(self, skeleton: Skeleton, steps: Sequence[ChainStep]) -> None:
        super().__init__()
        self.config = skeleton.config
        self.parts = {step: skeleton.copy(step) for step in steps if isinstance(step, str) and skeleton.has(step)}
        self.held = nn.ModuleList(self.parts.values())
        self.steps = [step for step in steps if not isinstance(step, str) or step in self.parts]

    def forward(self, x: Tensor) -> Tensor:
        """The result of the last step."""
        for step in self.steps:
            x = self.parts[step](x) if isinstance(step, str) else step(x, self.config)
        return x


class GPT2Embedding(Layer):
    """Token ids [B, T] to hidden states [B, T, C]: token and position embeddings, summed, then dropout."""

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = (skeleton.copy(f"transformer.{name}") for name in ("wte", "wpe", "drop"))
        self.parts = {"transformer.wte": self.wte, "transformer.wpe": self.wpe}

    def forward(self, ids_BT: Tensor) -> Tensor:
        """The first hidden states, [B, T, C]."""
        hidden_BTC: Tensor = self.drop(self.wte(ids_BT) + self.wpe(_positions(ids_BT)))
        return hidden_BTC


class GemmaEmbedding(Layer):
    """Token ids [B, T] to hidden states [B, T, C], which Gemma scales by the root of their width."""

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__()
        self.embed_tokens = skeleton.copy("model.embed_tokens")
        self.parts = {"model.embed_tokens": self.embed_tokens}
        # the first releases of transformers 5 scale outside the embedding
        scales = hasattr(self.embed_tokens, "embed_scale")
        self.scale = 1.0 if scales else skeleton.config.hidden_size**0.5

    def forward(self, ids_BT: Tensor) -> Tensor:
        """The first hidden states, [B, T, C]."""
        hidden_BTC: Tensor = self.embed_tokens(ids_BT) * self.scale
        return hidden_BTC


class OPTEmbedding(Layer):
    """Token ids [B, T] to hidden states [B, T, C]: token embeddings, widened where they are narrow, and positions."""

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__()
        names = ("embed_tokens", "embed_positions", "project_in")
        self.parts = {
            f"model.decoder.{name}": skeleton.copy(f"model.decoder.{name}")
            for name in names
            if skeleton.has(f"model.decoder.{name}")
        }
        self.held = nn.ModuleList(self.parts.values())

    def forward(self, ids_BT: Tensor) -> Tensor:
        """The first hidden states, [B, T, C]."""
        tokens, positions, *widen = self.held
        embedded_BTC = tokens(ids_BT)
        for project_in in widen:
            embedded_BTC = project_in(embedded_BTC)
        hidden_BTC: Tensor = embedded_BTC + positions(torch.ones_like(ids_BT), 0, position_ids=_positions(ids_BT))
        return hidden_BTC


class CausalBlock(Layer):
    """One block of a language model, [B, T, C] to [B, T, C]: each token sees itself and those before it."""

    def __init__(self, skeleton: Skeleton, name: str, index: int, *, rotary: str | None) -> None:
        super().__init__()
        config = skeleton.config
        self.block = skeleton.copy(name)
        self.rotary = skeleton.copy(rotary) if rotary is not None else None
        self.parts = {name: self.block}
        kinds = getattr(config, "layer_types", None)
        self.kind: str | None = kinds[index] if kinds else None
        slides = self.kind == "sliding_attention" or (kinds is None)
        self.window: int | None = getattr(config, "sliding_window", None) if slides else None
        self.eager = config._attn_implementation == "eager"

    def forward(self, hidden_BTC: Tensor) -> Tensor:
        """The next hidden states, [B, T, C]."""
        positions_1T = _positions(hidden_BTC)
        angles = {} if self.rotary is None else {"position_embeddings": self._angles(hidden_BTC, positions_1T)}
        mask = self._mask(hidden_BTC)
        return _first(self.block(hidden_BTC, attention_mask=mask, position_ids=positions_1T, use_cache=False, **angles))

    def _angles(self, hidden_BTC: Tensor, positions_1T: Tensor) -> Any:
        assert self.rotary is not None
        # models whose layers rotate differently ask for the kind of layer
        differs = hasattr(self.rotary, f"{self.kind}_inv_freq")
        return self.rotary(hidden_BTC, positions_1T, *([self.kind] if differs else []))

    def _mask(self, hidden_BTC: Tensor) -> Tensor | None:
        """The tokens that each token sees, [1, 1, T, T]; None if the attention is causal without a mask."""
        length = hidden_BTC.shape[1]
        slides = self.window is not None and self.window < length
        if not (slides or self.eager):
            return None
        back = torch.arange(length, device=hidden_BTC.device)
        distance_TT = back[:, None] - back[None, :]
        seen_TT = (distance_TT >= 0) & (distance_TT < (self.window or length))
        return _additive(seen_TT, hidden_BTC)[None, None] if self.eager else seen_TT[None, None]


class TypedEmbedding(Layer):
    """Token ids [B, T] to hidden states [B, T, C], by the embeddings of BERT and its kin, as one module."""

    def __init__(self, skeleton: Skeleton, name: str, side: tuple[str, ...], optional_side: tuple[str, ...]) -> None:
        super().__init__()
        self.embeddings = skeleton.copy(name)
        self.parts = {name: self.embeddings}
        self.side, self.optional_side = side, optional_side

    def forward(self, ids_BT: Tensor, **side: Tensor) -> Tensor:
        """The first hidden states, [B, T, C]."""
        # DeBERTa calls the attention mask "mask"
        renamed = {"mask" if name == "attention_mask" else name: tensor for name, tensor in side.items()}
        hidden_BTC: Tensor = self.embeddings(input_ids=ids_BT, **renamed)
        return hidden_BTC


class EncoderBlock(Layer):
    """One block of an encoder, [B, T, C] to [B, T, C]: each token sees all tokens but padding."""

    side = ("attention_mask",)

    def __init__(self, skeleton: Skeleton, name: str, index: int) -> None:
        super().__init__()
        self.block = skeleton.copy(name)
        self.parts = {name: self.block}
        self.eager = skeleton.config._attn_implementation == "eager"

    def forward(self, hidden_BTC: Tensor, *, attention_mask: Tensor) -> Tensor:
        """The next hidden states; `attention_mask` [B, T] is 0 at padding."""
        batch, length = attention_mask.shape
        seen_B1TT = attention_mask.bool()[:, None, None, :].expand(batch, 1, length, length)
        mask = _additive(seen_B1TT, hidden_BTC) if self.eager else seen_B1TT
        return _first(self.block(hidden_BTC, mask))


class DebertaBlock(Layer):
    """One block of DeBERTa in its own encoder, with the relative positions that all blocks share."""

    side = ("attention_mask",)

    def __init__(self, skeleton: Skeleton, name: str, index: int) -> None:
        super().__init__()
        block = skeleton.copy(name)
        encoder_name, _, _ = name.rpartition(".layer.")
        self.encoder = skeleton.copy(encoder_name, layer=nn.ModuleList([block]))
        if index > 0:
            # the convolution stands after the first block
            self.encoder.conv = None
        children = {f"{encoder_name}.{child}": module for child, module in self.encoder.named_children()}
        del children[f"{encoder_name}.layer"]
        self.parts = {**children, name: block}

    def forward(self, hidden_BTC: Tensor, *, attention_mask: Tensor) -> Tensor:
        """The next hidden states; `attention_mask` [B, T] is 0 at padding."""
        return _first(self.encoder(hidden_BTC, attention_mask, output_hidden_states=False, return_dict=False))


def first_token(hidden_BTC: Tensor, config: Any) -> Tensor:
    """The state of each sample's first token, [B, C], which represents the sample."""
    return hidden_BTC[:, 0]


def relu(x: Tensor, config: Any) -> Tensor:
    """The hidden state where it is positive, 0 elsewhere."""
    return nn.functional.relu(x)


def softcap(logits: Tensor, config: Any) -> Tensor:
    """The logits bent smoothly into the range that Gemma allows, if the configuration names one."""
    cap = config.final_logit_softcapping
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _positions(x_BT: Tensor) -> Tensor:
    return torch.arange(x_BT.shape[1], device=x_BT.device)[None]


def _additive(seen: Tensor, like: Tensor) -> Tensor:
    """0 where a token is seen and the least number elsewhere, for attention that adds its mask."""
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill(~seen, torch.finfo(like.dtype).min)


def _first(result: Any) -> Tensor:
    # some blocks return a tuple, and the same block in some releases
    tensor: Tensor = result[0] if isinstance(result, tuple) else result
    return tensor
