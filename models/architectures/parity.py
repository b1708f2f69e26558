"""Whether a cut model of transformers computes what the uncut one computes: a tiny copy runs both ways before training.

A cut model runs the library's own forward, and hands on the hidden state alone. A forward that carries more from block
to block, such as states of a recurrence or keys that later blocks share, would train another model without a word: no
name is missing, only the numbers show it. The copy has the model's own configuration with three blocks, or as many as
show each kind, small widths, a small vocabulary and noise for weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.errors.calls import first_line
from thinwire.models.architectures.library import (
    AUX_LOSS_WEIGHTS,
    OF_BLOCKS,
    aux_loss_weight,
    fields_of_blocks,
    kinds_of_blocks,
    take_apart,
    tied_names,
    unsplit,
    untie,
)
from thinwire.models.errors import ModelError
from thinwire.models.layers import Blueprint, Stage, Weights, build_stage, parameters_on_meta
from thinwire.models.precision import threads
from thinwire.models.tasks import TaskName, WithLoss
from thinwire.models.tensors import as_tuple

_SAMPLES, _LENGTH, _VOCABULARY, _WINDOW, _HEADS, _NUMBERS, _MANY = 2, 8, 64, 4, 4, 8, 32
_PROMPT = 3
_NOISE, _LARGEST = 65_537, 2**28
_ROUNDING = 1e-5
"""The largest difference of two values, as a share of the largest; rounding in float32 makes about 1e-6."""
_MOST_BLOCKS = 12
_SWITCH = {
    **dict.fromkeys(("sliding_window", "window_size", "local_attention", "attention_chunk_size"), _WINDOW),
    **dict.fromkeys(("floor_scale", "compress_rates", "original_max_position_embeddings"), _WINDOW),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), _WINDOW),
    "index_topk": 1,
    "unpadded_vocab_size": _VOCABULARY,  # the rows of a head
    "vocab_size_per_layer_input": _VOCABULARY,  # the rows of each block's own embedding
}
"""What forwards compare lengths with, and the largest value in a tiny copy, whose samples pass it as real ones may."""
_OF_HEAD = re.compile(r"head_dim|d_head|d_kv|head_size|rotary_dim")
_WIDTH = re.compile(r"hidden_size|intermediate|_dim$|^dim$|d_model|n_embd|n_inner|_rank$|ffn|d_ff|d_ssm|expansion_size")
_HEAD_COUNT = re.compile(r"num_attention_heads|num_key_value_heads|n_heads?$|num_heads$")
_EXPERTS = re.compile(r"num_(local_)?experts$|n_routed_experts$")
"""The names of fields: numbers of a head, widths of the model, heads, and experts."""


_FOUND: dict[tuple[str, TaskName, bool], str] = {}
"""What comparisons of this process have found; commands and studies prepare one model many times."""


@dataclass(frozen=True)
class _Given(Weights):
    """Values of a whole model that lie in memory, and are of the same configuration."""

    state: Mapping[str, Tensor]

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the values."""
        for name, tensor in tensors.items():
            tensor.copy_(self.state[name])


def check_parity(config: Any, task: TaskName, *, packed: bool = False) -> str:
    """Compare the layers of a tiny copy of a model with the library's uncut one: logits and gradients.

    Returns what was found, in a sentence. `packed` is whether samples hold several texts.

    Raises:
        ModelError: the layers cannot run, or differ from the uncut model beyond rounding; or a token of a language
            model sees later ones, or those of another text.
    """
    found = _FOUND.get(key := (config.to_json_string(), task, packed))
    if found is None:
        with threads(1):  # a launcher with others would not fork
            found = _FOUND[key] = _compare(config, task, packed)
    return found


def _compare(config: Any, task: TaskName, packed: bool) -> str:
    name = config.model_type
    small, whole, blueprint, tokens, side = tiny(config, task)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            theirs = whole(input_ids=tokens, **side)
            loss = getattr(theirs, "aux_loss", None) if aux_loss_weight(small) else None
            expected = _backward(theirs.logits if loss is None else WithLoss(theirs.logits, loss))
            filled = replace(blueprint, checkpoint=_Given(whole.state_dict()))
            stage = build_stage(filled, range(len(blueprint.layers)), seed=0).eval()
            found = _backward(stage(tokens, **side))
        except ModelError:
            raise
        except Exception as error:  # of the library
            raise ModelError(
                f"a tiny copy of {name} must run block by block, and does not: {first_line(error)}; "
                "give its layers as module:factory"
            ) from error
    parameters = stage.full_parameters()
    pairs = {
        **{what: (found.get(what, torch.empty(0)), value) for what, value in expected.items()},
        **{
            f"the gradient of {full_name}": (_gradient(parameters[full_name]), _gradient(parameter))
            for full_name, parameter in whole.named_parameters()
        },
    }
    worst, difference = max(((what, _difference(*pair)) for what, pair in pairs.items()), key=lambda found: found[1])
    if not difference <= _ROUNDING:
        raise ModelError(
            f"a tiny copy of {name}, cut after every block, must compute what the uncut model computes, and {worst} "
            f"differs by {difference:.2g} of its largest value: blocks of this model hand on more than the hidden "
            "state, and cannot train in several stages; give its layers as module:factory"
        )
    if task == "causal-lm" and tokens.shape[1] > 1:
        _check_causal(name, whole, tokens, side, expected["logits"])
    if packed:
        _check_packing(name, stage, whole, tokens)
    return (
        f"a tiny copy of {name} computes the same, cut after every block and uncut: its {' and '.join(expected)} and "
        f"{len(pairs) - len(expected)} gradients differ by {difference:.1g} at most"
    )


@threads(1)
def remembers(config: Any, task: TaskName) -> bool:
    """Whether the layers of a tiny copy of a model, one token at a time, compute what they compute of all at once."""
    try:
        _, whole, blueprint, tokens, side = tiny(config, task)
        filled = replace(blueprint, checkpoint=_Given(whole.state_dict()))
        stage = build_stage(filled, range(len(blueprint.layers)), seed=0).eval()
        with torch.no_grad():
            at_once = as_tuple(stage(tokens, **side))[0]
            stage.remember(True)
            parts = tokens.split([_PROMPT] + [1] * (tokens.shape[1] - _PROMPT), dim=1)
            one_by_one = [as_tuple(stage(part))[0] for part in parts]
        return _difference(torch.cat(one_by_one, dim=1), at_once) <= _ROUNDING
    except Exception:  # of the library: a forward that takes no cache, or keeps it in another way
        return False


def _backward(output: Tensor | WithLoss) -> dict[str, Tensor]:
    """The logits, and the auxiliary loss by name, if there is one; after a backward by which both count much."""
    named = {"logits": output} if isinstance(output, Tensor) else {"logits": output[0], "auxiliary loss": output[1]}
    torch.autograd.backward(list(named.values()), [_noise(each.shape, seed=1) for each in named.values()])
    return {what: each.detach() for what, each in named.items()}


def _check_causal(name: str, whole: Any, tokens: Tensor, side: Mapping[str, Tensor], expected: Tensor) -> None:
    changed = tokens.clone()
    changed[:, -1] = tokens[:, 0]
    with torch.no_grad():
        other = whole(input_ids=changed, **side).logits
    if _difference(other[:, :-1], expected[:, :-1]) > _ROUNDING:
        raise ModelError(
            f"a token of a language model must not see later ones, and those of {name} do, because this configuration "
            "is that of an encoder"
        )


def _check_packing(name: str, stage: Stage, whole: Any, tokens: Tensor) -> None:
    """The second half of each sample, as a conversation of its own, must be computed as by itself."""
    half = tokens.shape[1] // 2
    positions = torch.cat([torch.arange(half), torch.arange(tokens.shape[1] - half)]).expand_as(tokens)
    with torch.no_grad():
        together = as_tuple(stage(tokens, position_ids=positions))[0]
        alone = whole(input_ids=tokens[:, half:]).logits
    if _difference(together[:, half:], alone) > _ROUNDING:
        raise ModelError(
            f"a sample must hold one text for {name}, as with data.packing: false: in a tiny copy of it, texts in one "
            f"sample see each other"
        )


def _difference(got: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest value; 1 where the shapes differ."""
    if got.shape != expected.shape:
        return 1.0
    if not expected.numel():
        return 0.0
    # where all is next to nothing there is rounding alone
    return float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _noise(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tiny(config: Any, task: TaskName) -> tuple[Any, Any, Blueprint, Tensor, dict[str, Tensor]]:
    """The configuration with few blocks, tokens and small widths; the uncut model of it, its layers, and their inputs.

    The library builds some models whose widths do not fit each other. So the uncut one must run as well.
    """
    said: Exception | None = None
    count = 0
    try:
        factors, count = _factors(config), shown_by(kinds_of_blocks(config, task))
    except Exception as error:  # of the library, for what this kind of configuration does not have
        said, factors = error, []
    for heads, numbers in factors:
        try:
            small = _smaller(config, count, heads, numbers)
            whole, blueprint = _filled(small, task), take_apart(small, task)
            tokens, side = _samples(blueprint, small, task)
            with torch.no_grad():
                whole(input_ids=tokens, **side)
            return small, whole, blueprint, tokens, side
        except Exception as error:  # of the library, which checks fields in its own ways
            said = said or error
    assert said is not None, "there are factors"
    if isinstance(said, ModelError):
        raise said
    raise ModelError(
        f"a model must be compared with a tiny copy of itself, and none can be made of this configuration of "
        f"{config.model_type}: {first_line(said)}"
    ) from said


def _factors(config: Any) -> list[tuple[int, int]]:
    """How many times fewer heads, each with how many times fewer numbers: the smallest first, the whole model last."""
    fields, mapped = config.to_dict(), config.attribute_map
    heads, groups, width = (
        fields.get(mapped.get(name, name)) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    heads = heads or 4
    groups = groups or heads
    width = width or config.hidden_size // heads
    fewer = max(n for n in range(1, heads + 1) if heads % n == groups % n == 0 and heads // n >= min(heads, _HEADS))
    narrower = [2**n for n in range(10) if width % 2**n == 0 and width >> n >= _NUMBERS] or [1]
    return [(count, factor) for count in dict.fromkeys((fewer, 1)) for factor in reversed(narrower)]


def shown_by(kinds: Sequence[Any]) -> int:
    """How many blocks from the first on show each kind."""
    last = max(kinds.index(kind) for kind in kinds)
    return min(len(kinds), max(3, 1 + last), _MOST_BLOCKS)


def _lowered(value: Any, most: int | None = None) -> Any:
    """A field with which forwards compare lengths, so low that a few tokens pass it."""
    if not isinstance(value, dict):
        return min(value, most) if most and type(value) is int and value > 0 else value
    if value.get("rope_type", "longrope") != "longrope":  # others make their angles of it, of any length
        return value
    return {name: _lowered(each, _SWITCH.get(name, most)) for name, each in value.items()}


def _smaller(config: Any, count: int, heads: int, numbers: int) -> Any:
    """The configuration with so many blocks, times fewer heads, each of times fewer numbers, and little else."""
    fields = config.to_dict()
    changed = fields_of_blocks(config, count)
    changed |= _shrunk(fields, heads, numbers)
    if OF_BLOCKS in changed:
        changed[OF_BLOCKS] = {place: own | _shrunk(own, heads, numbers) for place, own in changed[OF_BLOCKS].items()}
    # so that the auxiliary loss shows beside the logits
    changed |= {name: 1.0 for name in AUX_LOSS_WEIGHTS if fields.get(name)}
    changed |= {"vocab_size": min(config.vocab_size, _VOCABULARY), "use_cache": False}
    switches = (*_SWITCH, "rope_parameters")
    changed |= {name: _lowered(fields[name], _SWITCH.get(name)) for name in switches if name in fields}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = fields.get(name)
        if isinstance(token, list) or (token or 0) >= changed["vocab_size"]:
            changed[name] = 0
    return type(config).from_dict(fields | changed)


def _shrunk(fields: Mapping[str, Any], heads: int, numbers: int) -> dict[str, int]:
    """The fields that change with so many times fewer heads, each of so many times fewer numbers, and few experts."""
    changed = {}
    factors = {_OF_HEAD: numbers, _WIDTH: heads * numbers, _HEAD_COUNT: heads}
    for name, value in fields.items():
        if type(value) is not int:
            continue
        factor = next((factor for pattern, factor in factors.items() if pattern.search(name)), None)
        if factor is not None and factor > 1:
            whole = _HEAD_COUNT.search(name) or value % (8 * factor) == 0
            # kernels of experts ask for whole lines of memory
            changed[name] = value // factor if whole else 8 * math.ceil(value / (8 * factor))
        elif _EXPERTS.search(name):
            changed[name] = min(value, _MANY)
    return changed


def _filled(config: Any, task: TaskName) -> Any:
    """The unsplit model with noise for weights: none is left at 0 or 1, where it would do nothing."""
    with torch.random.fork_rng(devices=[]), parameters_on_meta():
        whole = unsplit(config, task).eval()
    untie(whole, tied_names(whole))
    numbers = sum(parameter.numel() for parameter in whole.parameters())
    if numbers > _LARGEST:
        raise ModelError(
            f"a tiny copy of {config.model_type} must have at most {_LARGEST} parameters, got {numbers}, because its "
            "configuration allows no smaller widths"
        )
    # one piece of noise again and again, of a length that no width divides: to draw all would take many times as long
    noise = 0.05 * _noise((_NOISE,), seed=0)
    state = whole.state_dict()
    for name, tensor in state.items():
        if tensor.is_meta:
            values = noise.repeat(1 + tensor.numel() // _NOISE)[: tensor.numel()].view(tensor.shape)
            # scales of norms at which what follows is not next to nothing
            state[name] = values + 0.5 if tensor.ndim == 1 else values
    whole.load_state_dict(state, assign=True)
    return whole


def _samples(blueprint: Blueprint, config: Any, task: TaskName) -> tuple[Tensor, dict[str, Tensor]]:
    """Token ids [B, T] and the side inputs that the layers read. The second sample of a classifier is padded."""
    length = min(_LENGTH, blueprint.max_positions or _LENGTH)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size // 2, config.vocab_size, (_SAMPLES, length), generator=generator)
    if task == "causal-lm":
        return tokens, {}
    mask = (torch.arange(length) < torch.tensor([[length], [length - length // 3]])).long()
    known = {"attention_mask": mask, "token_type_ids": (torch.arange(length) > length // 2).long() * mask}
    tokens = torch.where(mask.bool(), tokens, getattr(config, "pad_token_id", None) or 0)
    return tokens, {name: known[name] for name in blueprint.side if name in known}
