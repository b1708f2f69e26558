"""Predictions for a pipeline over slow links, from the simulation: speed, needed bandwidth, the best schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from thinwire.launch.shared.links import Network
from thinwire.launch.timing.step_time import Course, time_step
from thinwire.launch.timing.timetable import timetable
from thinwire.launch.timing.workload import NO_COMPRESSION, UNCOMPRESSED, Workload, label
from thinwire.pipeline.frames import CHANNELS
from thinwire.pipeline.options import CompressionOptions
from thinwire.pipeline.schedules import SCHEDULES

HIDDEN = 0.95
"""The wire is hidden if a step keeps this share of its speed with unlimited bandwidth."""
PAYS = 1.05
"""Compression pays if it makes a step this many times as fast."""
SLOWEST, FASTEST = 1e3, 1e13
"""Range of the search for a bandwidth, in bits a second."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One schedule with one codec over one network."""

    schedule: str
    codec: str
    bandwidth: float
    """Bits a second."""
    seconds: float
    """One step, fill and drain of its passes included."""
    samples_per_second: float
    speedup: float
    """Speed over that of the same schedule and network without compression."""
    of_unthrottled: float
    """Speed over that of the same schedule with unlimited bandwidth and the same latency, uncompressed."""
    in_flight: float
    """The most activations that a process holds at one time, in micro-batches through all its stages."""
    busy: tuple[float, ...]
    """Seconds of each process computing, encoding and decoding."""
    wait: tuple[float, ...]
    """Seconds of each process idle while a frame that it needs is on the wire."""
    bubble: tuple[float, ...]
    """Seconds of each process idle otherwise."""


def run(workload: Workload, schedule: str, compression: CompressionOptions, network: Network) -> Course:
    """Simulate one pass; its processes are the workload's stages."""
    cut = workload.cut_for(schedule)
    table = timetable(schedule, cut.num_stages, workload.num_stages, cut.num_microbatches)
    return time_step(table, cut.forward, cut.backward, *(cut.frames(name, compression, network) for name in CHANNELS))


def limit(workload: Workload, schedule: str, compression: CompressionOptions, network: Network) -> float:
    """Seconds of a step that no implementation can beat: codecs cost nothing, everything else is as in `run`."""
    return workload.accumulation * run(replace(workload, costs={}), schedule, compression, network).seconds


def predict_each(
    workload: Workload, schedule: str, codecs: Sequence[CompressionOptions], network: Network
) -> list[Prediction]:
    """Simulate one optimizer step with each of several codecs, and compare it with an uncompressed step."""
    passes = workload.accumulation
    uncompressed = limit(workload, schedule, NO_COMPRESSION, network)
    unthrottled = limit(workload, schedule, NO_COMPRESSION, replace(network, bandwidth=math.inf))
    predictions = []
    for compression in codecs:
        course = run(workload, schedule, compression, network)
        seconds = passes * course.seconds
        predictions.append(
            Prediction(
                schedule=schedule,
                codec=label(compression),
                bandwidth=network.bandwidth,
                seconds=seconds,
                samples_per_second=workload.samples / seconds,
                speedup=uncompressed / seconds,
                of_unthrottled=unthrottled / seconds,
                in_flight=max(course.table.held("process")) / SCHEDULES[schedule].stages_per_process,
                busy=tuple((passes * course.busy).tolist()),
                wait=tuple((passes * course.wait).tolist()),
                bubble=tuple((passes * course.bubble).tolist()),
            )
        )
    return predictions


def needed_bandwidth(workload: Workload, schedule: str, compression: CompressionOptions, network: Network) -> float:
    """The bandwidth in bits a second below which the wire is the bottleneck.

    There, a step has less than the share HIDDEN of its speed with unlimited bandwidth and the same latency. It is 0
    if every bandwidth is enough.
    """

    def seconds(bandwidth: float) -> float:
        return run(workload, schedule, compression, replace(network, bandwidth=bandwidth)).seconds

    allowed = seconds(math.inf) / HIDDEN
    if seconds(SLOWEST) <= allowed:
        return 0.0
    low, high = math.log(SLOWEST), math.log(FASTEST)
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if seconds(math.exp(middle)) <= allowed else (middle, high)
    return math.exp(high)


def mistakes_of(workload: Workload, schedule: str) -> list[str]:
    """Why a schedule cannot run a workload's micro-batches on its processes, with a layer for each stage."""
    spec = SCHEDULES[schedule]
    count = workload.num_stages * spec.stages_per_process
    mistakes = spec.mistakes(count, spec.stages_per_process, workload.num_microbatches)
    if workload.layers is not None and count > workload.layers:
        mistakes.append(
            f"{schedule} cuts the model into {count} stages, {spec.stages_per_process} for each of "
            f"{workload.num_stages} processes, but it has {workload.layers} layers; take a smaller "
            f"--pipeline.num_stages or another --schedule"
        )
    return mistakes


def best(predictions: Sequence[Prediction], max_in_flight: float = math.inf) -> Prediction | None:
    """The fastest prediction that holds at most `max_in_flight` micro-batches; None if there is none.

    It is one without compression where compression does not pay.
    """
    fitting = [prediction for prediction in predictions if prediction.in_flight <= max_in_flight]
    by_speed = sorted(fitting, key=lambda one: (-one.samples_per_second, one.in_flight))
    plain = [one for one in by_speed if one.codec == UNCOMPRESSED]
    if plain and by_speed[0].samples_per_second < PAYS * plain[0].samples_per_second:
        return plain[0]
    return by_speed[0] if by_speed else None


def verdict(predictions: Sequence[Prediction]) -> str:
    """A sentence that says whether compression pays, from predictions for one schedule and bandwidth."""
    winner = max(predictions, key=lambda prediction: prediction.speedup)
    where = f"at {bandwidth_text(winner.bandwidth)} with {winner.schedule}"
    if winner.speedup < PAYS:
        return f"{where} compression does not pay: take none, because no codec here gains {PAYS - 1:.0%} of speed"
    return (
        f"{where} compression pays: {winner.codec} is {winner.speedup:.2f}x as fast as uncompressed, "
        f"and reaches {winner.of_unthrottled:.0%} of the speed at unlimited bandwidth"
    )


def bandwidth_text(bits: float) -> str:
    """A bandwidth as text, such as 100mbit."""
    if math.isinf(bits):
        return "unlimited bandwidth"
    for unit, scale in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if bits >= scale:
            return f"{bits / scale:.3g}{unit}" if bits / scale < 1000 else f"{bits / scale:.0f}{unit}"
    return f"{bits:.0f}bit"
