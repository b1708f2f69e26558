"""The times of layers of one's own, measured before training: whether the cut, which counts operations, is even.

A cut must be the same in every process, in a simulation, and when a run goes on. Times differ from run to run, so they
do not make the cut: they say which one would be even, and the user takes it into the recipe.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from thinwire.launch.run.assembly import Assembly
from thinwire.launch.run.summary import module_of
from thinwire.models.costs import time_layers
from thinwire.models.partition import partition
from thinwire.pipeline.stage import CompressedStage

UNEVEN = 1.5
"""How many times as long as in the best cut the slowest stage may compute before it is worth a line."""
NOTICED = 0.005
"""Seconds of a micro-batch on the slowest stage from which on it is."""


def uneven_cut(assembly: Assembly) -> str | None:
    """What to write for an even cut, in a sentence, where the last stage lives; None where there is nothing to say.

    Collective. Every process times the layers of its own stages on one micro-batch; only layers of one's own, whose
    cut the recipe does not give, are timed.
    """
    prepared = assembly.prepared
    if prepared.blueprint.counted or prepared.recipe.pipeline.layers is not None or len(prepared.cuts) < 2:
        return None
    gathered = assembly.placement.gather(
        {stage.stage_index: _seconds(assembly, stage) for stage in assembly.trainer.stages}
    )
    return None if gathered is None else advice(gathered)


def advice(times: Sequence[Sequence[float]]) -> str | None:
    """The sentence for stages whose layers take so many seconds a micro-batch; None where the cut is even enough."""
    seconds = [one for stage in times for one in stage]
    if len(seconds) < len(times) or not all(times):
        return None
    best = partition(seconds, len(times))
    slowest = max(sum(stage) for stage in times)
    even = max(sum(seconds[layer] for layer in cut) for cut in best)
    if slowest < NOTICED or slowest < UNEVEN * even:
        return None
    ends = [0, *accumulate(len(stage) for stage in times)]
    stage = max(range(len(times)), key=lambda index: sum(times[index]))
    return (
        f"stage {stage} (layers {ends[stage]} to {ends[stage + 1] - 1}) computes {1e3 * slowest:.0f} ms a micro-batch, "
        f"where the slowest stage of an even cut takes {1e3 * even:.0f} ms; to cut there: --pipeline.layers "
        f"'{json.dumps([len(cut) for cut in best])}'"
    )


def _seconds(assembly: Assembly, stage: CompressedStage) -> list[float]:
    """Seconds of each layer of a stage; empty where a layer cannot be copied or run alone."""
    prepared = assembly.prepared
    ids, samples = torch.arange(prepared.recipe.pipeline.microbatch_size), prepared.data.training
    try:
        inputs: tuple[Tensor, ...]
        if stage.is_first:
            inputs = (samples.inputs(ids, 0),)
        else:
            inputs = tuple(_values(example) for example in prepared.outputs[stage.stage_index - 1])
        return time_layers(module_of(stage), inputs, samples.side(ids))
    except Exception:  # of the user's code: training runs it again, and tells
        return []


def _values(example: Tensor) -> Tensor:
    """A tensor like the example: Gaussian where it is floating, zero elsewhere."""
    if not example.is_floating_point():
        return torch.zeros(example.shape, dtype=example.dtype)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(example.shape, generator=generator).to(example.dtype).requires_grad_(example.requires_grad)
