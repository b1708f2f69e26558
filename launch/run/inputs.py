"""What a stage is given where it runs by itself: to be timed or compiled before the first step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.compress.transfer import put
from thinwire.models.data.clients import some_ids
from thinwire.models.data.samples import Samples
from thinwire.pipeline.devices.device import put_all


def stage_inputs(
    index: int, outputs: Sequence[tuple[Tensor, ...]], samples: Samples, rows: int, device: torch.device
) -> tuple[Tensor, tuple[Tensor, ...], dict[str, Tensor]]:
    """One micro-batch of a stage: the ids of its samples, its inputs, and the side inputs by name.

    The inputs are samples for the first stage, Gaussian values for the others.

    Args:
        index: the stage.
        outputs: of each stage of the pipeline for a micro-batch, as meta tensors.
        samples: the training data.
        rows: the samples of a micro-batch.
        device: where the stage computes.
    """
    ids = some_ids(samples, rows)
    given = (samples.inputs(ids, 0),) if index == 0 else tuple(map(_values, outputs[index - 1]))
    # a moved tensor is no leaf, and needs its gradient asked for again
    inputs = tuple(put(x, device).detach().requires_grad_(x.requires_grad) for x in given)
    return ids, inputs, put_all(samples.side(ids), device)


def _values(example: Tensor) -> Tensor:
    """A tensor like the example: Gaussian values for a floating-point tensor, else zeros."""
    if not example.is_floating_point():
        return torch.zeros(example.shape, dtype=example.dtype)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(example.shape, generator=generator).to(example.dtype).requires_grad_(example.requires_grad)
