"""The cells of a study whose numbers are predictions: arithmetic of a pipeline whose sizes and times are given.

Nothing is trained and nothing is kept: all cells together take seconds, so the report computes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from pandas import DataFrame

from thinwire.launch.recipe.fields import read_fields
from thinwire.launch.shared.links import Network, parse_bandwidth, parse_latency
from thinwire.launch.study.definition import PredictedPipeline, Row, Study
from thinwire.launch.timing.exchange_time import ReplicaWork
from thinwire.launch.timing.prediction import predict
from thinwire.launch.timing.workload import UNCOMPRESSED, Workload, codec_pair, frame_bytes, uniform
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.frames import ChannelName
from thinwire.pipeline.options import CompressionOptions, ReplicaOptions
from thinwire.pipeline.schedules import SCHEDULES

MOST_PASSES = 10**5
"""Forward passes of a step in all stages: what takes some seconds to predict."""
MOST_ELEMENTS = 10**12
"""Elements of a stage's output."""


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """What a row of predictions may set."""

    codec: str
    """The codecs of activations and gradients, such as q(4)/q(8)."""
    bandwidth: str
    """Of every wire, such as 100mbit."""
    latency: str = "0ms"
    """Of every link, in one direction."""
    replica_codec: str = UNCOMPRESSED
    """The codec of the gradients of weights between replicas."""


Setting = tuple[Workload, str, CompressionOptions, Network]
"""The pipeline, its schedule, codecs and links: what `predict` takes."""


def _frame_milliseconds(channel: ChannelName, setting: Setting) -> float:
    """The time of one frame over the first boundary."""
    workload, _, compression, network = setting
    nbytes = frame_bytes(workload.boundaries[0], compression, 0, channel)
    return 8e3 * nbytes / network.bandwidth + 1e3 * network.latency


SCORES: Mapping[str, Callable[[Setting], float]] = {
    "samples/s": lambda setting: predict(*setting).samples_per_second,
    "ms an activation": partial(_frame_milliseconds, "activations"),
    "ms a gradient": partial(_frame_milliseconds, "gradients"),
}
"""What can be predicted: the speed of all replicas, and the time of a frame on the wire."""


def predicted(study: Study, rows: Mapping[str, Row]) -> DataFrame:
    """The cells of a study of predictions, a row a line, with its number under `on`.

    Raises:
        OptionsError: some rows cannot be predicted; every mistake, with its row.
    """
    assert study.prediction is not None, "a study of predictions says what is predicted"
    workload, mistakes = _workload(study.prediction), list[str]()
    values = dict[str, float]()
    for name, row in rows.items():
        try:
            options = {**study.options, **row.options}
            values[name] = _value(study.prediction, workload, options, row.score or study.score)
        except OptionsError as error:
            mistakes += [f"rows.{name}: {mistake}" for mistake in error.mistakes]
    if mistakes:
        raise OptionsError(mistakes)
    return DataFrame({"row": values.keys(), "seed": 0, "on": values.values()})


def _value(pipeline: PredictedPipeline, workload: Workload, options: Mapping[str, object], score: str) -> float:
    if score not in SCORES:
        raise OptionsError(f"score must be one of {', '.join(SCORES)} in a study of predictions, got {score!r}")
    wanted: RowOptions = read_fields(RowOptions, options, "options")
    rate = parse_bandwidth(wanted.bandwidth)
    if not rate:
        raise OptionsError(f"options: bandwidth must be above 0 and limited, got {wanted.bandwidth!r}")
    network = Network(bandwidth=1e6 * rate, latency=parse_latency(wanted.latency) / 1e3, wires=pipeline.wires)
    ReplicaOptions(count=max(2, pipeline.replicas), gradients=wanted.replica_codec)  # raises for what is no codec
    codecs = codec_pair(wanted.codec)
    return SCORES[score]((workload.exchanging(wanted.replica_codec), pipeline.schedule, codecs, network))


def _workload(pipeline: PredictedPipeline) -> Workload:
    """A pipeline as the simulation takes it. OptionsError where its parts do not fit together."""
    count, weights = pipeline.num_stages, pipeline.weights
    OptionsError.require(
        (count >= 2, f"prediction.num_stages must be at least 2, because a prediction needs links, got {count}"),
        (
            count * pipeline.num_microbatches <= MOST_PASSES,
            f"prediction.num_stages times num_microbatches must be at most {MOST_PASSES:,}, got {count} and "
            f"{pipeline.num_microbatches}",
        ),
        (
            len(pipeline.shape) > 0 and min(pipeline.shape) > 0 and math.prod(pipeline.shape) <= MOST_ELEMENTS,
            f"prediction.shape must be that of a stage's output, samples first, of at most {MOST_ELEMENTS:,} elements; "
            f"got {pipeline.shape}",
        ),
        (
            all(0 < time < math.inf for time in (pipeline.forward_ms, pipeline.backward_ms)),
            f"prediction.forward_ms and backward_ms must be above 0 and finite, got {pipeline.forward_ms} and "
            f"{pipeline.backward_ms}",
        ),
        (pipeline.replicas >= 1, f"prediction.replicas must be at least 1, got {pipeline.replicas}"),
        (
            min(weights, default=0) >= 0,
            f"prediction.weights must be numbers of weights, at least 0, got {min(weights, default=0)}",
        ),
        (
            pipeline.replicas == 1 or len(weights) == count,
            f"prediction.weights must have the number of weights of each of {count} stages beside replicas, "
            f"got {len(weights)} numbers",
        ),
    )
    if mistakes := SCHEDULES[pipeline.schedule].mistakes(count, 1, pipeline.num_microbatches):
        raise OptionsError([f"prediction: {mistake}" for mistake in mistakes])
    workload = uniform(
        "prediction",
        num_stages=count,
        num_microbatches=pipeline.num_microbatches,
        forward=pipeline.forward_ms / 1e3,
        backward=pipeline.backward_ms / 1e3,
        shape=tuple(pipeline.shape),
    )
    if pipeline.replicas == 1:
        return workload
    return replace(
        workload, replicas=ReplicaWork(count=pipeline.replicas, gradients=UNCOMPRESSED, elements=tuple(weights))
    )
