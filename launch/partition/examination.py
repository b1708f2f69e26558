"""The cost of each layer of a recipe's model, the cut of the recipe, and the best cut, as tables."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.launch.run.assembly import Prepared
from thinwire.launch.shared.links import parse_bandwidth
from thinwire.launch.shared.tables import Table, Value
from thinwire.launch.timing.workload import codec_pair, frame_bytes
from thinwire.models.costs import LayerCost, count, measure
from thinwire.models.data.clients import some_ids
from thinwire.models.layers import stage_output_examples
from thinwire.models.partition import boundary_seconds, partition
from thinwire.pipeline.devices.device import choose
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.frames import CHANNELS, ChannelName
from thinwire.pipeline.options import CompressionOptions

_COPIES = {"adamw": 4, "quantized-adam": 4, "sgd": 3}
"""Tensors as large as the parameters that training keeps: parameters, gradients, moments of the optimizer."""


def examine(prepared: Prepared, options: argparse.Namespace) -> tuple[list[Table], list[int]]:
    """The tables, and the number of layers of each stage in the best cut."""
    bandwidth = parse_bandwidth(options.bandwidth)
    if options.memory is not None and not options.memory > 0:
        raise OptionsError(f"--memory must be above 0 GB, got {options.memory:g}")
    codecs = {expression: codec_pair(expression) for expression in options.codec}
    if options.count and (bandwidth is not None or options.memory is not None):
        raise OptionsError("--bandwidth and --memory need measured costs; remove --count")
    costs = _costs(prepared, counted=options.count)
    layers = range(len(costs))
    outputs = stage_output_examples(
        prepared.blueprint,
        [range(index, index + 1) for index in layers],
        prepared.inputs,
        prepared.recipe.training.precision,
        side=prepared.side,
    )
    memory = None if options.count else [_memory(cost, prepared) for cost in costs]
    cuts = partition(
        [cost.compute for cost in costs],
        prepared.recipe.pipeline.num_stages,
        boundary_costs=None if bandwidth is None else _boundary_costs(prepared, outputs[:-1], bandwidth),
        memory=memory,
        memory_limit=math.inf if options.memory is None else options.memory * 1e9,
    )
    tables = [
        _layers_table(costs, cuts, counted=options.count),
        _stages_table("the cut of the recipe", prepared.cuts, costs, memory),
        _stages_table("the best cut for these costs", cuts, costs, memory),
        *(_boundaries_table(channel, outputs, cuts, codecs) for channel in CHANNELS),
    ]
    return tables, [len(cut) for cut in cuts]


def _costs(prepared: Prepared, *, counted: bool) -> tuple[LayerCost, ...]:
    """The cost of each layer for one micro-batch of the training data, counted or measured."""
    training = prepared.recipe.training
    if counted:
        return count(
            prepared.blueprint,
            prepared.inputs,
            precision=training.precision,
            recompute=training.recompute,
            side=prepared.side,
        )
    torch.set_num_threads(training.threads)
    ids = some_ids(prepared.data.training, prepared.recipe.pipeline.microbatch_size)
    return measure(
        prepared.blueprint,
        prepared.data.training.inputs(ids, 0),
        seed=training.seed,
        precision=training.precision,
        recompute=training.recompute,
        device=choose(training.device),
        side=prepared.data.training.side(ids),
    )


def _memory(cost: LayerCost, prepared: Prepared) -> int:
    recipe = prepared.recipe
    return cost.memory(parameter_copies=_COPIES[recipe.optimizer.name], microbatches=recipe.pipeline.num_microbatches)


def _boundary_costs(prepared: Prepared, outputs: Sequence[tuple[Tensor, ...]], bandwidth: float) -> list[float]:
    """Seconds on the wire of one micro-batch, for a boundary after each layer, with the recipe's common codecs."""
    common = replace(prepared.recipe.compression, boundaries={}).without_auto("thinwire partition")
    return [
        boundary_seconds(
            frame_bytes(output, common, 0, "activations"), frame_bytes(output, common, 0, "gradients"), bandwidth
        )
        for output in outputs
    ]


def _layers_table(costs: Sequence[LayerCost], cuts: Sequence[range], *, counted: bool) -> Table:
    stage_of = {layer: stage for stage, cut in enumerate(cuts) for layer in cut}
    if counted:
        columns = ["layer", "compute", "share", "weights, MB", "output, kB", "stage"]
        scale, total = 1.0, sum(cost.compute for cost in costs)
        rows: list[list[Value]] = [
            [cost.name, cost.compute * scale, cost.compute / total, cost.parameter_bytes / 1e6, cost.output_bytes / 1e3]
            for cost in costs
        ]
    else:
        columns = ["layer", "forward, ms", "backward, ms", "weights, MB", "kept, MB", "output, kB", "stage"]
        rows = [
            [
                cost.name,
                cost.forward * 1e3,
                cost.backward * 1e3,
                cost.parameter_bytes / 1e6,
                (cost.activation_bytes or 0) / 1e6,
                cost.output_bytes / 1e3,
            ]
            for cost in costs
        ]
    title = "layers, for one micro-batch" + (", counted" if counted else ", measured on this machine")
    return Table(title, columns, [[*row, stage_of[index]] for index, row in enumerate(rows)])


def _stages_table(title: str, cuts: Sequence[range], costs: Sequence[LayerCost], memory: Sequence[int] | None) -> Table:
    compute = [sum(costs[layer].compute for layer in cut) for cut in cuts]
    columns = ["stage", "first layer", "last layer", "layers", "compute, of slowest"]
    rows: list[list[Value]] = [
        [stage, costs[cut.start].name, costs[cut.stop - 1].name, len(cut), compute[stage] / max(compute)]
        for stage, cut in enumerate(cuts)
    ]
    if memory is None:
        return Table(title, columns, rows)
    taken = [sum(memory[layer] for layer in cut) / 1e6 for cut in cuts]
    return Table(title, [*columns, "memory, MB"], [[*row, cell] for row, cell in zip(rows, taken, strict=True)])


def _boundaries_table(
    channel: ChannelName,
    outputs: Sequence[tuple[Tensor, ...]],
    cuts: Sequence[range],
    codecs: Mapping[str, CompressionOptions],
) -> Table:
    rows: list[list[Value]] = [
        [index, *(frame_bytes(outputs[cut.stop - 1], codec, index, channel) for codec in codecs.values())]
        for index, cut in enumerate(cuts[:-1])
    ]
    title = f"{channel} of a micro-batch over each boundary of the best cut, bytes"
    return Table(title, ["boundary", *codecs], rows)
