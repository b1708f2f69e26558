"""The inputs of a stage where it runs by itself: to be timed or compiled before the first step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.compress.transfer import put
from thinwire.models.data.samples import Samples


def stage_inputs(
    index: int, outputs: Sequence[tuple[Tensor, ...]], samples: Samples, ids: Tensor, device: torch.device
) -> tuple[Tensor, ...]:
    """One micro-batch of inputs of a stage: samples for the first one, Gaussian values for the others.

    Args:
        index: the stage.
        outputs: of each stage of the pipeline, as meta tensors.
        samples: the training data.
        ids: those of the samples.
        device: where the stage computes.
    """
    given = (samples.inputs(ids, 0),) if index == 0 else tuple(map(_values, outputs[index - 1]))
    # a moved tensor is no leaf, and needs its gradient asked for again
    return tuple(put(x, device).detach().requires_grad_(x.requires_grad) for x in given)


def _values(example: Tensor) -> Tensor:
    """A tensor like the example: Gaussian values for a floating-point tensor, else zeros."""
    if not example.is_floating_point():
        return torch.zeros(example.shape, dtype=example.dtype)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(example.shape, generator=generator).to(example.dtype).requires_grad_(example.requires_grad)
