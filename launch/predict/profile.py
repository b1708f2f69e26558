"""A recipe as a workload: the tensors at its boundaries, and the times of its stages and codecs on this machine.

Of all the code of a prediction, only this file builds models.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.compress import Key, Method
from thinwire.compress.transfer import put
from thinwire.launch.plan.prepare import prepare
from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.recipe.recipe import Recipe
from thinwire.launch.shared.progress import showing
from thinwire.launch.timing.workload import CodecCost, Workload
from thinwire.models.costs import time_once
from thinwire.models.precision import threads
from thinwire.pipeline.devices.device import CPU, choose, seconds_now
from thinwire.pipeline.frames import CHANNELS, ChannelName
from thinwire.pipeline.measuring.meters import Meter
from thinwire.pipeline.options import CompressionOptions
from thinwire.pipeline.training.optimization import WholeBatchLoss
from thinwire.pipeline.wire.channel import is_coded

REPETITIONS = 5


def from_recipe(recipe: Recipe, codecs: Sequence[CompressionOptions], given: tuple[float, float] | None) -> Workload:
    """The workload of a recipe, with one stage in each process.

    `given` are seconds of one micro-batch forward and backward on every stage; then nothing is measured, and codecs
    take no time. With None each stage is built, timed on one micro-batch of the training data, and dropped; codecs are
    timed too.

    Raises:
        ModelError: the parts of the recipe do not fit together.
    """
    prepared = prepare(recipe)
    count = len(prepared.cuts)
    forward, backward = given or (0.0, 0.0)
    workload = Workload(
        name=recipe.name,
        num_microbatches=recipe.pipeline.num_microbatches,
        microbatch_size=recipe.pipeline.microbatch_size,
        forward=(forward,) * count,
        backward=(backward,) * count,
        boundaries=tuple(prepared.outputs[:-1]),
        accumulation=recipe.pipeline.accumulation,
        layers=len(prepared.blueprint.layers),
        steps=prepared.recipe.training.steps,
    )
    prepared.tell_notes()
    if given is not None:
        return workload
    with threads(recipe.training.threads), showing("timing the stages and codecs"):
        forwards, backwards = zip(*(time_stage(prepared, index) for index in range(count)), strict=True)
        costs = codec_costs(codecs, workload, choose(recipe.training.device))
        return replace(workload, forward=forwards, backward=backwards, costs=costs)


def time_stage(prepared: Prepared, index: int) -> tuple[float, float]:
    """Median seconds of one micro-batch forward and back through one stage; the last stage includes the loss."""
    device = choose(prepared.recipe.training.device)
    stage = prepared.build(index, device)
    data = prepared.data
    ids, inputs, side = prepared.stage_inputs(index, device)
    targets = put(data.training.targets(ids), device)
    last, loss = index == len(prepared.cuts) - 1, WholeBatchLoss(data.task, Meter())

    def run() -> Tensor | tuple[Tensor, ...]:
        output = stage(*inputs, **side)
        return loss(output, targets) if last else output

    forwards, backwards = zip(*(time_once(run) for _ in range(1 + REPETITIONS)), strict=True)
    return statistics.median(forwards[1:]), statistics.median(backwards[1:])  # the first repetition is a warm-up


def codec_costs(
    codecs: Sequence[CompressionOptions], workload: Workload, device: torch.device = CPU
) -> Mapping[tuple[ChannelName, str], CodecCost]:
    """Median seconds of the codec of each method for a frame, with the tensors of the first boundary that uses it.

    The time of feedback is not included. `reuse` needs the indices of an activation, so it counts as free.
    """
    found: dict[tuple[ChannelName, str], tuple[Method, list[Tensor]]] = {}
    for compression in codecs:
        for index, examples in enumerate(workload.boundaries):
            for channel in CHANNELS:
                method = compression.method(index, channel)
                crossing = [example for example in examples if is_coded(example)]
                if crossing and not method.codec.reuses_indices:
                    found.setdefault((channel, str(method)), (method, crossing))
    costs = {name: [time_codec(method, one, device) for one in crossing] for name, (method, crossing) in found.items()}
    return {
        name: CodecCost(encode=sum(cost.encode for cost in each), decode=sum(cost.decode for cost in each))
        for name, each in costs.items()
    }


def time_codec(method: Method, example: Tensor, device: torch.device = CPU) -> CodecCost:
    """Median seconds to encode and to decode Gaussian data with the shape of `example`."""
    codec = method.codec
    values = torch.randn(example.shape).to(example.dtype).to(device)
    payload = torch.empty(codec.nbytes(example.shape, example.dtype), dtype=torch.uint8, device=device)
    decoded = torch.empty_like(values)
    key = Key(seed=0, boundary=0, channel="activations", phase="train", step=0, microbatch=0)
    return CodecCost(
        encode=_median_seconds(lambda: codec.encode(values, payload, key, None), device),
        decode=_median_seconds(lambda: codec.decode(payload, decoded, key, None), device),
    )


def _median_seconds(act: Callable[[], object], device: torch.device) -> float:
    act()
    times = []
    for _ in range(REPETITIONS):
        begun = seconds_now(device)
        act()
        times.append(seconds_now(device) - begun)
    return statistics.median(times)
