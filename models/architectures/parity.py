"""Whether the layers of a family compute what the unsplit model computes: both run on a few tokens.

A family says which modules run, in order. What else the library's own `forward` does, such as granite's multiplications
between embedding, blocks and head, has no weight, so no name is missing: only the numbers show it. The tests compare
the families of Thinwire. A user's family is compared each time a model of it is made: with two blocks, or as many as
show each kind, full widths, a small vocabulary and random weights. That takes less memory than a stage of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.errors.calls import first_line
from thinwire.models.architectures.families import Family, fields_of_blocks, take_apart, unsplit
from thinwire.models.errors import ModelError
from thinwire.models.layers import Blueprint, build_stage, parameters_on_meta

_SAMPLES, _LENGTH, _VOCABULARY, _WINDOW = 2, 8, 64, 4
_NOISE = 65_537
_ROUNDING = 1e-4
"""The largest difference of two logits, as a share of the largest logit; rounding in float32 makes about 1e-6."""


@dataclass(frozen=True)
class _Given:
    """Values of a whole model that lie in memory."""

    state: Mapping[str, Tensor]

    def lacking(self, names: Sequence[str]) -> list[str]:
        """Nothing: the model is whole."""
        return []

    def unread(self, names: Sequence[str]) -> list[str]:
        """Nothing: names are compared where the family is taken apart."""
        return []

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing to compare: the tensors are those of the same configuration."""

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the values."""
        for name, tensor in tensors.items():
            tensor.copy_(self.state[name])


def check_parity(family: Family, config: Any) -> None:
    """Compare the layers of a family, for a configuration of it, with the library's unsplit model.

    Raises:
        ModelError: if the layers cannot run, or their logits differ from those of the unsplit model beyond rounding.
    """
    small, blueprint = _small(family, config)
    name = f"the family {family.name!r}"
    with torch.no_grad():
        whole = _filled(family, small)
        tokens, side = _samples(blueprint, small)
        try:
            expected = whole(input_ids=tokens, **side).logits
            filled = replace(blueprint, checkpoint=_Given(whole.state_dict()))
            logits = build_stage(filled, range(len(blueprint.layers)), seed=0).eval()(tokens, **side)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f"{name} must run the layers as {family.architecture} does: {first_line(error)}"
            ) from error
    assert isinstance(logits, Tensor)
    largest = expected.abs().max()
    difference = (logits - expected).abs().max() if logits.shape == expected.shape else largest
    if not difference <= _ROUNDING * largest:
        raise ModelError(
            f"{name} must compute what {family.architecture} computes, and its logits differ by up to "
            f"{difference:.2g} where the largest is {largest:.2g}: the library's forward does more than run these "
            "layers; say what, in embedding, block or head of the family"
        )


def _filled(family: Family, config: Any) -> Any:
    """The unsplit model with noise for weights: none is left at 0 or 1, where it would do nothing."""
    with torch.random.fork_rng(devices=[]), parameters_on_meta():
        whole = unsplit(family, config).eval()
    # one piece of noise again and again, of a length that no width divides: to draw all would take many times as long
    noise = 0.05 * torch.randn(_NOISE, generator=torch.Generator().manual_seed(0))
    state = {
        name: noise.repeat(1 + tensor.numel() // _NOISE)[: tensor.numel()].view(tensor.shape)
        if tensor.is_meta
        else tensor
        for name, tensor in whole.state_dict().items()
    }
    whole.load_state_dict(state, assign=True)
    return whole


def _small(family: Family, config: Any) -> tuple[Any, Blueprint]:
    """The configuration with few blocks and tokens, taken apart; the given one where the library refuses that."""
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["block"]
    count = min(layers, max(2, 1 + max(kinds.index(kind) for kind in set(kinds))))
    fields = config.to_dict()
    changed = fields_of_blocks(config, count)
    changed |= {"vocab_size": min(config.vocab_size, _VOCABULARY), "tie_word_embeddings": False, "use_cache": False}
    if fields.get("sliding_window"):
        changed["sliding_window"] = min(fields["sliding_window"], _WINDOW)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(fields.get(name), list) or (fields.get(name) or 0) >= changed["vocab_size"]:
            changed[name] = None
    try:
        small = type(config).from_dict(fields | changed)
        return small, take_apart(family, small)
    except Exception:  # of the library, which checks fields in its own ways
        return config, take_apart(family, config)


def _samples(blueprint: Blueprint, config: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Token ids [B, T] and the side inputs that the layers read; the second of the samples is padded."""
    length = min(_LENGTH, blueprint.max_positions or _LENGTH)
    padding = getattr(config, "pad_token_id", None) or 0
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size // 2, config.vocab_size, (_SAMPLES, length), generator=generator)
    if "attention_mask" not in blueprint.side:
        return tokens, {}
    mask = (torch.arange(length) < torch.tensor([[length], [length - length // 3]])).long()
    known = {"attention_mask": mask, "token_type_ids": (torch.arange(length) > length // 2).long() * mask}
    tokens = torch.where(mask.bool(), tokens, padding)
    return tokens, {name: known[name] for name in blueprint.side if name in known}
