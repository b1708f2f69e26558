"""The times of the user's own layers, measured before training. They show whether the cut by counted costs is even.

A cut must be the same in every process, in a simulation, and when a run goes on. Times differ from run to run, so they
do not decide the cut. The run prints a better cut, and the user can put it into the recipe.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate

from thinwire.launch.run.assembly import Assembly
from thinwire.launch.run.inputs import stage_inputs
from thinwire.launch.run.summary import module_of
from thinwire.models.costs import time_layers
from thinwire.models.data.clients import some_ids
from thinwire.models.partition import partition
from thinwire.pipeline.devices.device import put_all
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.stage import CompressedStage

WORSE_THAN_BEST_CUT = 1.5
"""If the slowest stage computes so many times as long as in the best cut, the run prints the best cut."""
LEAST_MICROBATCH_SECONDS = 0.005
"""Seconds of one micro-batch. If the slowest stage takes less, the run prints nothing."""


def uneven_cut(assembly: Assembly) -> str | None:
    """A sentence with a better cut, in the process of the last stage; None if the cut is even enough. Collective.

    Every process times the layers of its stages on one micro-batch. Nothing is timed if the recipe gives the cut, or
    if the layers are not the user's own.
    """
    prepared = assembly.prepared
    if prepared.blueprint.counted or prepared.recipe.pipeline.layers is not None or len(prepared.cuts) < 2:
        return None
    trainer = assembly.trainer
    spent = {stage.stage_index: _seconds(assembly, stage) for stage in trainer.stages}
    gathered = collectives.gather(trainer.placement, spent)
    return None if gathered is None else advice(gathered)


def advice(times: Sequence[Sequence[float]]) -> str | None:
    """The sentence for these times (seconds of each layer, by stage); None if the cut is even enough."""
    seconds = [one for stage in times for one in stage]
    if len(seconds) < len(times) or not all(times):
        return None
    best = partition(seconds, len(times))
    slowest = max(sum(stage) for stage in times)
    even = max(sum(seconds[layer] for layer in cut) for cut in best)
    if slowest < LEAST_MICROBATCH_SECONDS or slowest < WORSE_THAN_BEST_CUT * even:
        return None
    ends = [0, *accumulate(len(stage) for stage in times)]
    stage = max(range(len(times)), key=lambda index: sum(times[index]))
    return (
        f"stage {stage} (layers {ends[stage]} to {ends[stage + 1] - 1}) computes {1e3 * slowest:.0f} ms a micro-batch; "
        f"the slowest stage of the best cut takes {1e3 * even:.0f} ms; to use the best cut: --pipeline.layers "
        f"'{json.dumps([len(cut) for cut in best])}'"
    )


def _seconds(assembly: Assembly, stage: CompressedStage) -> list[float]:
    """Seconds of each layer of a stage; empty if a layer cannot be copied or run alone."""
    prepared = assembly.prepared
    samples = prepared.data.training
    ids = some_ids(samples, prepared.recipe.pipeline.microbatch_size)
    try:
        module, device = module_of(stage), stage.device
        inputs = stage_inputs(stage.stage_index, prepared.outputs, samples, ids, device)
        return time_layers(module, inputs, put_all(samples.side(ids), device))
    except Exception:  # of the user's code: training runs it again, and reports
        return []
