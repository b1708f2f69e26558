"""The supported families of transformers: a table, and how a configuration becomes a blueprint.

A family is one row: the class that holds the unsplit model, and the full names of its embedding, blocks and head. All
arithmetic is that of the library's own modules, and all names are those of its unsplit model.

The head of a language model has its own weight, for any number of stages. Many families tie it to the token embedding,
but the two are at opposite ends of the pipeline: tied, every step would send the gradient of the whole vocabulary
matrix, 154 MB for GPT-2 small, which no compression of activations makes smaller. With one stage it is untied too, so
the model is the same for every cut. A pretrained head starts as a copy of the embedding.
"""

import copy
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.errors.calls import first_line
from thinwire.models import hub
from thinwire.models.architectures.pieces import (
    CausalBlock,
    ChainStep,
    CopiedChain,
    DebertaBlock,
    EncoderBlock,
    GemmaEmbedding,
    GPT2Embedding,
    OPTEmbedding,
    Skeleton,
    TypedEmbedding,
    first_token,
    relu,
    softcap,
)
from thinwire.models.checkpoint import find, open_checkpoint
from thinwire.models.errors import ModelError
from thinwire.models.layers import Blueprint, Layer, LayerSpec, parameters_on_meta
from thinwire.models.tasks import TaskName

GENERATION = "generation_config.json"


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to split the models of one architecture into layers."""

    name: str
    """The type of its configuration in transformers."""
    architecture: str
    """The class of the unsplit model."""
    task: TaskName
    embedding: Callable[[Skeleton], Layer]
    blocks: str
    """The full name of the list of blocks."""
    block: Callable[[Skeleton, str, int], Layer]
    """Makes the layer of a block, from its full name and index."""
    head: tuple[ChainStep, ...]
    """The steps from the last hidden state to the logits."""
    tied: tuple[tuple[str, str], ...] = ()
    """Weights of the head, each with the weight it is tied to in a checkpoint."""
    fresh: tuple[str, ...] = ()
    """The prefixes of the weights that a pretrained model may lack; they are drawn."""
    shared: tuple[str, ...] = ()
    """The parts that all blocks share."""
    attention: str = "sdpa"
    """The library's implementation of attention."""
    unlisted: tuple[str, ...] = ()
    """Fields of a configuration that the library reads but does not list among its defaults."""
    refine: Callable[[str, nn.Module, Any], None] | None = None
    """Changes first values after the library's own rules, given full name, module and configuration."""
    positions_taken: Callable[[Any], int] = lambda config: 0
    """How many positions no token can use."""


def causal_family(name: str, architecture: str, base: str, **more: Any) -> Family:
    """A family with rotary positions, like most language models today."""
    tokens, norm = more.pop("tokens", "embed_tokens"), more.pop("norm", "norm")
    row: dict[str, Any] = {
        "embedding": partial(CopiedChain, steps=(f"{base}.{tokens}", f"{base}.emb_dropout")),
        "blocks": f"{base}.layers",
        "block": partial(CausalBlock, rotary=f"{base}.rotary_emb"),
        "head": (f"{base}.{norm}", f"{base}.project_out", "lm_head"),
        "tied": (("lm_head.weight", f"{base}.{tokens}.weight"),),
        **more,
    }
    return Family(name=name, architecture=architecture, task="causal-lm", **row)


def encoder_family(
    name: str,
    architecture: str,
    base: str,
    *,
    embedding: Callable[[Skeleton], Layer],
    head: tuple[ChainStep, ...],
    **more: Any,
) -> Family:
    """A family of classifiers with embedded positions; the attention mask marks the padding."""
    row: dict[str, Any] = {"blocks": f"{base}.encoder.layer", "block": EncoderBlock, **more}
    return Family(name=name, architecture=architecture, task="classification", embedding=embedding, head=head, **row)


def typed_embedding(
    name: str, side: tuple[str, ...] = (), optional_side: tuple[str, ...] = ()
) -> Callable[[Skeleton], Layer]:
    """What makes the embedding of BERT and its kin: its full name, and the side inputs that it reads."""
    return partial(TypedEmbedding, name=name, side=side, optional_side=optional_side)


def _shrink_residual_ends(full_name: str, module: nn.Module, config: Any) -> None:
    """Draw the weights that end a residual path smaller, as the GPT-2 paper does: transformers 5.0 forgets it."""
    if full_name.endswith(".c_proj"):
        std = config.initializer_range / math.sqrt(2 * config.n_layer)
        nn.init.normal_(module.get_parameter("weight"), std=std)


_GEMMA_HEAD: tuple[ChainStep, ...] = ("model.norm", "lm_head", softcap)

_EAGER = "eager"
"""The attention that every model of transformers has. The library's errors name it where a model has no other."""

_BUFFERS = (r"rotary_emb\.inv_freq$", r"\.position_ids$", r"masked_bias$")
"""Buffers that older releases of transformers stored."""

_AUTO_CLASSES: dict[TaskName, str] = {
    "causal-lm": "AutoModelForCausalLM",
    "classification": "AutoModelForSequenceClassification",
}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        causal_family(
            "gpt2",
            "GPT2LMHeadModel",
            "transformer",
            tokens="wte",
            embedding=GPT2Embedding,
            blocks="transformer.h",
            block=partial(CausalBlock, rotary=None),
            norm="ln_f",
            refine=_shrink_residual_ends,
        ),
        causal_family("llama", "LlamaForCausalLM", "model"),
        causal_family("qwen2", "Qwen2ForCausalLM", "model"),
        causal_family("qwen3", "Qwen3ForCausalLM", "model"),
        causal_family("mistral", "MistralForCausalLM", "model"),
        causal_family("gemma", "GemmaForCausalLM", "model", embedding=GemmaEmbedding),
        # scaled dot-product attention cannot bend its scores
        causal_family(
            "gemma2", "Gemma2ForCausalLM", "model", embedding=GemmaEmbedding, head=_GEMMA_HEAD, attention="eager"
        ),
        causal_family("gemma3_text", "Gemma3ForCausalLM", "model", embedding=GemmaEmbedding, head=_GEMMA_HEAD),
        causal_family(
            "gpt_neox",
            "GPTNeoXForCausalLM",
            "gpt_neox",
            # the head is called embed_out in the first releases of transformers 5
            head=("gpt_neox.final_layer_norm", "embed_out", "lm_head"),
            tied=tuple((f"{head}.weight", "gpt_neox.embed_in.weight") for head in ("lm_head", "embed_out")),
            tokens="embed_in",
        ),
        causal_family(
            "opt",
            "OPTForCausalLM",
            "model.decoder",
            embedding=OPTEmbedding,
            block=partial(CausalBlock, rotary=None),
            norm="final_layer_norm",
        ),
        encoder_family(
            "bert",
            "BertForSequenceClassification",
            "bert",
            embedding=typed_embedding("bert.embeddings", optional_side=("token_type_ids",)),
            head=("bert.pooler", "dropout", "classifier"),
            fresh=("bert.pooler.", "classifier."),
        ),
        encoder_family(
            "roberta",
            "RobertaForSequenceClassification",
            "roberta",
            embedding=typed_embedding("roberta.embeddings"),
            head=("classifier",),
            fresh=("classifier.",),
            # positions begin after the number of the padding token
            positions_taken=lambda config: config.pad_token_id + 1,
        ),
        encoder_family(
            "deberta-v2",
            "DebertaV2ForSequenceClassification",
            "deberta",
            embedding=typed_embedding(
                "deberta.embeddings", side=("attention_mask",), optional_side=("token_type_ids",)
            ),
            block=DebertaBlock,
            head=("pooler", "dropout", "classifier"),
            fresh=("pooler.", "classifier."),
            shared=("deberta.encoder.rel_embeddings", "deberta.encoder.LayerNorm"),
            attention="eager",
            unlisted=(
                *("position_buckets", "norm_rel_ebd", "share_att_key", "embedding_size", "pooler_hidden_size"),
                *("conv_kernel_size", "conv_groups", "conv_act", "cls_dropout"),
            ),
        ),
        encoder_family(
            "distilbert",
            "DistilBertForSequenceClassification",
            "distilbert",
            embedding=typed_embedding("distilbert.embeddings"),
            blocks="distilbert.transformer.layer",
            head=(first_token, "pre_classifier", relu, "dropout", "classifier"),
            fresh=("pre_classifier.", "classifier."),
        ),
    )
}
"""The families, by name."""

_TESTED = tuple(FAMILIES.values())


def is_own(family: Family) -> bool:
    """Whether a family is a user's: the tests compare only those above with the unsplit models of the library."""
    return not any(family is tested for tested in _TESTED)


def take_apart(family: Family, config: Any, *, block_size: int | None = None, source: str | None = None) -> Blueprint:
    """The model of a configuration of transformers in layers, with the weights of `source` if there is one.

    Token ids [B, T] go in; logits come out, [B, T, vocabulary] or [B, labels]. Costs are the multiplications of one
    token's forward pass, `block_size` tokens attending to each other.

    Raises:
        ModelError: the library refuses the configuration, or there are no weights to read.
    """
    always_tied = bool(getattr(config, "tie_word_embeddings", False))
    saved = copy.deepcopy(config)
    saved.tie_word_embeddings = False
    saved.architectures = [family.architecture]
    # a cache is for generation only
    config = copy.deepcopy(saved)
    config.use_cache = False
    skeleton = _skeleton(family, config)
    max_positions = _max_positions(family, config)
    length = block_size or max_positions or 0
    attention = 2.0 * length * config.hidden_size
    checkpoint = None
    if source is not None:
        checkpoint = open_checkpoint(
            source,
            base=skeleton.model.base_model_prefix,
            tied=dict(family.tied) if always_tied else {},
            fresh=family.fresh,
            ignored=(*_BUFFERS, *(skeleton.model._keys_to_ignore_on_load_unexpected or ())),
        )
    layers = (
        LayerSpec("embedding", partial(family.embedding, skeleton), float(config.hidden_size)),
        *(
            LayerSpec(
                f"block {index}",
                partial(family.block, skeleton, name, index),
                _multiplications(skeleton, [name]) + attention,
            )
            for index, name in enumerate(_block_names(family, skeleton))
        ),
        LayerSpec("head", partial(CopiedChain, skeleton, family.head), _multiplications(skeleton, family.head)),
    )
    # layers built without weights show which side inputs they read
    with parameters_on_meta():
        built = [spec.build() for spec in layers]
    left_over = skeleton.model.state_dict().keys() - {name for layer in built for name in layer.full_state()}
    if left_over:
        raise ModelError(
            f"{family.name} of this configuration, or of this release of transformers, must have no weights beside its "
            f"embedding, blocks and head, got {', '.join(sorted(left_over))}"
        )
    return Blueprint(
        layers=layers,
        initialize=partial(_initialize, family, skeleton),
        checkpoint=checkpoint,
        side=tuple(dict.fromkeys(name for layer in built for name in (*layer.side, *layer.optional_side))),
        shared=tuple(name for name in family.shared if skeleton.has(name)),
        vocab_size=config.vocab_size,
        max_positions=max_positions,
        save_config=partial(_save_config, saved, source),
        tied=dict(family.tied) if always_tied else {},
        dtype=str(getattr(saved, "dtype", None) or torch.float32).removeprefix("torch."),
    )


def fields_of_blocks(config: Any, count: int) -> dict[str, Any]:
    """The fields that make a configuration one of `count` blocks, at most as many as it has."""
    layers = config.num_hidden_layers
    # a list with an entry for each block gets shorter with them
    shortened = {
        name: value[:count]
        for name, value in config.to_dict().items()
        if isinstance(value, list) and len(value) == layers
    }
    return {**shortened, config.attribute_map.get("num_hidden_layers", "num_hidden_layers"): count}


def _block_names(family: Family, skeleton: Skeleton) -> list[str]:
    """The names of the model's blocks, in order. ModelError where the family names something else."""
    held = skeleton.get(family.blocks)
    if not isinstance(held, nn.ModuleList):
        raise ModelError(
            f"{family.blocks} of {family.architecture} must be a list of blocks, got {type(held).__name__}"
        )
    return [f"{family.blocks}.{index}" for index in range(len(held))]


def _save_config(config: Any, source: str | None, folder: Path) -> None:
    """Write config.json, and the source's generation settings: the tokens that end a text, how it samples."""
    config.save_pretrained(folder)
    generation = None if source is None else find(source, GENERATION)
    if generation is not None:
        shutil.copyfile(generation, folder / GENERATION)


def _skeleton(family: Family, config: Any) -> Skeleton:
    """The whole model without weights, as the library builds it."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), parameters_on_meta():
            model = unsplit(family, config)
    except Exception as error:  # of the library, whose modules check fields in their own ways
        said = f"transformers cannot build {family.name} of this configuration: {first_line(error)}"
        if family.attention != _EAGER and _EAGER in str(error):
            said = (
                f"attention of the family {family.name!r} must be one that {family.architecture} has, got "
                f'{family.attention!r}; add attention="{_EAGER}" to the family'
            )
        raise ModelError(said) from error
    found = type(model).__name__
    if found != family.architecture:
        raise ModelError(f"{family.name} of transformers is a {found}, and the family names {family.architecture}")
    return Skeleton(model)


def unsplit(family: Family, config: Any) -> Any:
    """The whole model, as the library builds it."""
    import transformers

    auto: Any = getattr(transformers, _AUTO_CLASSES[family.task])
    return auto.from_config(config, dtype=torch.float32, attn_implementation=family.attention, **hub.NO_CODE)


def _initialize(family: Family, skeleton: Skeleton, full_name: str, module: nn.Module) -> None:
    skeleton.model._init_weights(module)
    if family.refine is not None:
        family.refine(full_name, module, skeleton.config)


def _max_positions(family: Family, config: Any) -> int | None:
    longest: int | None = getattr(config, "max_position_embeddings", None)
    return None if longest is None else longest - family.positions_taken(config)


def _multiplications(skeleton: Skeleton, steps: Sequence[ChainStep]) -> float:
    """The multiplications of one token: one for each number of each matrix."""
    modules = [skeleton.get(step) for step in steps if isinstance(step, str) and skeleton.has(step)]
    return float(sum(p.numel() for module in modules for p in module.parameters() if p.ndim > 1))
