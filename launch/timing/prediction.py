"""Predictions for a pipeline over slow links, from the simulation: speed, needed bandwidth, the best schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from thinwire.launch.timing.network import Link, Network
from thinwire.launch.timing.step_time import Course, time_step
from thinwire.launch.timing.timetable import timetable
from thinwire.launch.timing.workload import Workload, label
from thinwire.pipeline.options import CompressionOptions
from thinwire.pipeline.schedules import SCHEDULES

HIDDEN = 0.95
"""The wire is hidden if a step keeps this share of its speed with unlimited bandwidth."""
PAYS = 1.05
"""Compression pays if it makes a step this many times as fast."""
NO_COMPRESSION = CompressionOptions(activations="none", gradients="none")
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
    """One step, fill and drain included."""
    samples_per_second: float
    speedup: float
    """Speed over that of the same schedule and network without compression."""
    of_unthrottled: float
    """Speed over that of the same schedule with unlimited bandwidth, uncompressed."""
    in_flight: float
    """The most activations that a process holds at one time, in micro-batches through all its stages."""
    busy: tuple[float, ...]
    """Seconds of each process computing, encoding and decoding."""
    wait: tuple[float, ...]
    """Seconds of each process idle while a frame that it needs is on the wire."""
    bubble: tuple[float, ...]
    """Seconds of each process idle otherwise."""


def run(workload: Workload, schedule: str, compression: CompressionOptions, network: Network) -> Course:
    """Simulate one step; its processes are the workload's stages."""
    cut = workload.cut_for(schedule)
    table = timetable(schedule, cut.num_stages, cut.num_microbatches)
    activations = cut.channel("activations", compression, network)
    return time_step(table, cut.compute(), activations, cut.channel("gradients", compression, network))


def limit(workload: Workload, schedule: str, compression: CompressionOptions, network: Network) -> float:
    """Seconds of a step that no implementation can beat: codecs cost nothing, everything else is as in `run`."""
    return run(replace(workload, costs={}), schedule, compression, network).seconds


def predict(workload: Workload, schedule: str, compression: CompressionOptions, network: Network) -> Prediction:
    """Simulate one step, and compare it with an uncompressed step."""
    return predict_each(workload, schedule, [compression], network)[0]


def predict_each(
    workload: Workload, schedule: str, codecs: Sequence[CompressionOptions], network: Network
) -> list[Prediction]:
    """The prediction of `predict` for each of several codecs."""
    uncompressed = limit(workload, schedule, NO_COMPRESSION, network)
    unthrottled = limit(workload, schedule, NO_COMPRESSION, Network())
    predictions = []
    for compression in codecs:
        course = run(workload, schedule, compression, network)
        predictions.append(
            Prediction(
                schedule=schedule,
                codec=label(compression),
                bandwidth=network.bandwidth,
                seconds=course.seconds,
                samples_per_second=workload.samples / course.seconds,
                speedup=uncompressed / course.seconds,
                of_unthrottled=unthrottled / course.seconds,
                in_flight=float(course.table.held.max()) / SCHEDULES[schedule].stages_per_process,
                busy=tuple(course.busy.tolist()),
                wait=tuple(course.wait.tolist()),
                bubble=tuple(course.bubble.tolist()),
            )
        )
    return predictions


def needed_bandwidth(
    workload: Workload, schedule: str, compression: CompressionOptions, network: Network, hidden: float = HIDDEN
) -> float:
    """The bandwidth in bits a second below which the wire is the bottleneck.

    There, a step has less than the share `hidden` of its speed with unlimited bandwidth and the same latency. It is 0
    if every bandwidth is enough. Links with their own bandwidth keep it; if they alone make a step too slow, the result
    is infinity.
    """
    free = {pair: replace(link, bandwidth=math.inf) for pair, link in network.links.items()}
    unlimited = replace(network, bandwidth=math.inf, links=free)
    allowed = run(workload, schedule, compression, unlimited).seconds / hidden

    def hides(bandwidth: float) -> bool:
        return run(workload, schedule, compression, replace(network, bandwidth=bandwidth)).seconds <= allowed

    if hides(SLOWEST):
        return 0.0
    if not hides(math.inf):
        return math.inf
    low, high = math.log(SLOWEST), math.log(FASTEST)
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if hides(math.exp(middle)) else (middle, high)
    return math.exp(high)


def hides_in_words(bandwidth: float, links: Mapping[tuple[int, int], Link]) -> str:
    """A sentence that says which bandwidth hides the wire; `links` have their own bandwidth."""
    hides = f"hides the wire ({HIDDEN:.0%} of full speed)"
    if math.isinf(bandwidth):
        return f"never {hides}: --link makes {_names(links)} too slow, at any bandwidth of the other links"
    needs = f"from {bandwidth_text(bandwidth)} up" if bandwidth else "at any bandwidth"
    return f"{hides} {needs}" + (f" of the links other than {_names(links)}" if links else "")


def _names(links: Mapping[tuple[int, int], Link]) -> str:
    """Links by their stages, as --link names them."""
    both = [f"{a}-{b}" for a, b in links if a < b and (b, a) in links]
    return ", ".join([*both, *(f"{a}>{b}" for a, b in links if (b, a) not in links)])


def possible(workload: Workload, schedules: Iterable[str]) -> list[str]:
    """The schedules that can run a workload's micro-batches on its processes."""
    return [
        name
        for name in schedules
        for spec in (SCHEDULES[name],)
        if not spec.mistakes(
            workload.num_stages * spec.stages_per_process, spec.stages_per_process, workload.num_microbatches
        )
    ]


def best(predictions: Sequence[Prediction], max_in_flight: float = math.inf) -> Prediction | None:
    """The fastest prediction that holds at most `max_in_flight` micro-batches; None if there is none."""
    fitting = [prediction for prediction in predictions if prediction.in_flight <= max_in_flight]
    return max(fitting, key=lambda prediction: (prediction.samples_per_second, -prediction.in_flight), default=None)


def verdict(predictions: Sequence[Prediction]) -> str:
    """A sentence that says whether compression pays, from predictions for one schedule and bandwidth."""
    winner = max(predictions, key=lambda prediction: prediction.speedup)
    where = f"at {bandwidth_text(winner.bandwidth)} with {winner.schedule}"
    if winner.speedup < PAYS:
        return f"{where} compression does not pay: the best of these codecs gains less than {PAYS - 1:.0%} of speed"
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
