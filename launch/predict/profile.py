"""A recipe as a workload: the tensors at its boundaries, and the times of its stages and codecs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from timeit import repeat

import torch
from torch import Tensor

from thinwire.compress import Key, Method
from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.predict.cuts import MeasuredMachine
from thinwire.launch.timing.workload import CodecCost, Examples, Workload
from thinwire.pipeline.devices.device import CPU, choose, seconds_now
from thinwire.pipeline.frames import CHANNELS, ChannelName
from thinwire.pipeline.options import CompressionOptions
from thinwire.pipeline.wire.channel import is_coded

REPETITIONS = 5


def workload_of(
    prepared: Prepared,
    codecs: Sequence[CompressionOptions],
    given: tuple[float, float] | None,
    places: Sequence[MeasuredMachine],
) -> Workload:
    """The workload of a recipe, with one stage in each process.

    `given` are seconds of one micro-batch forward and backward on every stage; then codecs take no time. With None a
    stage takes what its layers do at its place, and codecs are timed here.
    """
    recipe, boundaries = prepared.recipe, tuple(prepared.outputs[:-1])
    if given is None:
        layers = [[place.costs[layer] for layer in cut] for place, cut in zip(places, prepared.cuts, strict=True)]
        pairs = [(sum(one.forward for one in own), sum(one.backward for one in own)) for own in layers]
        costs = codec_costs(codecs, boundaries, choose(recipe.training.device))
    else:
        pairs, costs = [given] * len(prepared.cuts), {}
    return Workload(
        name=recipe.name,
        num_microbatches=recipe.pipeline.num_microbatches,
        microbatch_size=recipe.pipeline.microbatch_size,
        forward=tuple(forward for forward, _ in pairs),
        backward=tuple(backward for _, backward in pairs),
        boundaries=boundaries,
        costs=costs,
        accumulation=recipe.pipeline.accumulation,
        layers=len(prepared.blueprint.layers),
        steps=recipe.training.steps,
    )


def codec_costs(
    codecs: Sequence[CompressionOptions], boundaries: Sequence[Examples], device: torch.device = CPU
) -> dict[tuple[ChannelName, str], CodecCost]:
    """Median seconds of the codec of each method for a frame, with the tensors of the first boundary that uses it.

    The time of feedback is not included. `reuse` needs the indices of an activation, so it counts as free.
    """
    found: dict[tuple[ChannelName, str], tuple[Method, list[Tensor]]] = {}
    for compression in codecs:
        for index, examples in enumerate(boundaries):
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
    return statistics.median(repeat(act, timer=partial(seconds_now, device), repeat=REPETITIONS, number=1))
