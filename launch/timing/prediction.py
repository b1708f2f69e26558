"""Predictions for a pipeline over slow links, from the simulation: speed, needed bandwidth, the best schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from thinwire.compress import parse
from thinwire.launch.timing.exchange_time import NO_COMPRESSION, UNCOMPRESSED, ExchangeTime, time_exchange
from thinwire.launch.timing.network import Network
from thinwire.launch.timing.step_time import Course, time_step
from thinwire.launch.timing.timetable import timetable
from thinwire.launch.timing.workload import Workload, label
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
class ExchangePrediction:
    """What the exchange between replicas costs."""

    nbytes: int
    """Bytes that a process sends to its replicas in an exchange, the most of all processes."""
    seconds: float
    """The longest exchange of a process."""
    adds: float
    """Seconds that the exchange adds to a step; the drain of the pipeline hides the rest."""
    every: int
    """Steps from one exchange to the next in the comparison."""
    samples_per_second_every: float
    """The speed if replicas exchange so many bytes only every `every` steps."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One schedule with one codec over one network."""

    schedule: str
    codec: str
    compressed: bool
    """Whether anything is: between stages, or between replicas."""
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
    exchange: ExchangePrediction | None = None
    """The exchange between replicas; None for one pipeline."""
    passes: int = 1
    """Passes in the step of the replica that takes longest; `busy`, `wait` and `bubble` are those of one of them."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step: a pass, or with replicas all passes and the exchange."""

    course: Course
    """One pass."""
    exchange: ExchangeTime | None
    seconds: float
    passes: int = 1
    """Those of the replica that has the most; the exchange waits for it."""


def run(workload: Workload, schedule: str, compression: CompressionOptions, network: Network) -> Course:
    """Simulate one pass; its processes are the workload's stages."""
    cut = workload.cut_for(schedule)
    table = timetable(schedule, cut.num_stages, cut.num_microbatches)
    channels = [cut.channel(name, compression, network) for name in CHANNELS]
    return time_step(table, cut.compute(), *channels)


def step(workload: Workload, schedule: str, compression: CompressionOptions, network: Network) -> Step:
    """Simulate one optimizer step."""
    course, replicas = run(workload, schedule, compression, network), workload.replicas
    if replicas is None:
        return Step(course=course, exchange=None, seconds=course.seconds)
    exchange, passes = time_exchange(replicas, course, network), max(replicas.passes, default=1)
    return Step(course=course, exchange=exchange, seconds=passes * course.seconds + exchange.adds, passes=passes)


def limit(workload: Workload, schedule: str, compression: CompressionOptions, network: Network) -> float:
    """Seconds of a step that no implementation can beat: codecs cost nothing, everything else is as in `step`."""
    return step(workload.without_costs, schedule, compression, network).seconds


def predict(workload: Workload, schedule: str, compression: CompressionOptions, network: Network) -> Prediction:
    """Simulate one step, and compare it with an uncompressed step."""
    return predict_each(workload, schedule, [compression], network)[0]


def predict_each(
    workload: Workload, schedule: str, codecs: Sequence[CompressionOptions], network: Network, every: int = 1
) -> list[Prediction]:
    """The prediction of `predict` for each of several codecs; replicas may also exchange after `every` steps."""
    nothing = workload.exchanging(UNCOMPRESSED)
    uncompressed = limit(nothing, schedule, NO_COMPRESSION, network)
    unthrottled = limit(nothing, schedule, NO_COMPRESSION, Network())
    predictions = []
    for compression in codecs:
        found = step(workload, schedule, compression, network)
        course = found.course
        predictions.append(
            Prediction(
                schedule=schedule,
                codec=label_of(workload, compression),
                compressed=label_of(workload, compression) != label_of(nothing, NO_COMPRESSION),
                bandwidth=network.bandwidth,
                seconds=found.seconds,
                samples_per_second=workload.samples / found.seconds,
                speedup=uncompressed / found.seconds,
                of_unthrottled=unthrottled / found.seconds,
                in_flight=float(course.table.held.max()) / SCHEDULES[schedule].stages_per_process,
                busy=tuple(course.busy.tolist()),
                wait=tuple(course.wait.tolist()),
                bubble=tuple(course.bubble.tolist()),
                exchange=_of_exchange(workload, found, every),
                passes=found.passes,
            )
        )
    return predictions


def _of_exchange(workload: Workload, found: Step, every: int) -> ExchangePrediction | None:
    exchange = found.exchange
    if exchange is None:
        return None
    return ExchangePrediction(
        nbytes=exchange.nbytes,
        seconds=exchange.longest,
        adds=exchange.adds,
        every=every,
        samples_per_second_every=workload.samples / (found.seconds - exchange.adds * (1 - 1 / every)),
    )


def label_of(workload: Workload, compression: CompressionOptions) -> str:
    """The codecs of a prediction: of the boundaries, and of the gradients between replicas if there are any."""
    common = label(compression)
    return f"{common}, replicas {parse(workload.replicas.gradients)}" if workload.replicas else common


def needed_bandwidth(
    workload: Workload, schedule: str, compression: CompressionOptions, network: Network, hidden: float = HIDDEN
) -> float:
    """The bandwidth in bits a second below which the wire is the bottleneck.

    There, a step has less than the share `hidden` of its speed with unlimited bandwidth and the same latency. It is 0
    if every bandwidth is enough. Links with their own bandwidth keep it; if they alone make a step too slow, the result
    is infinity.
    """
    free = {pair: replace(link, bandwidth=math.inf) for pair, link in network.links.items()}
    apart = replace(network.replicas, bandwidth=math.inf)
    unlimited = replace(network, bandwidth=math.inf, links=free, replicas=apart)
    allowed = step(workload, schedule, compression, unlimited).seconds / hidden

    def hides(bandwidth: float) -> bool:
        return step(workload, schedule, compression, replace(network, bandwidth=bandwidth)).seconds <= allowed

    if hides(SLOWEST):
        return 0.0
    if not hides(math.inf):
        return math.inf
    low, high = math.log(SLOWEST), math.log(FASTEST)
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if hides(math.exp(middle)) else (middle, high)
    return math.exp(high)


def possible(workload: Workload, schedules: Iterable[str]) -> list[str]:
    """The schedules that can run a workload's micro-batches on its processes, with a layer for each stage."""
    found = []
    for name in schedules:
        each = SCHEDULES[name].stages_per_process
        stages = workload.num_stages * each
        enough = workload.layers is None or stages <= workload.layers
        if enough and not SCHEDULES[name].mistakes(stages, each, workload.num_microbatches):
            found.append(name)
    return found


def best(predictions: Sequence[Prediction], max_in_flight: float = math.inf) -> Prediction | None:
    """The fastest prediction that holds at most `max_in_flight` micro-batches; None if there is none.

    It is one without compression where compression does not pay.
    """
    fitting = [prediction for prediction in predictions if prediction.in_flight <= max_in_flight]
    by_speed = sorted(fitting, key=lambda one: (-one.samples_per_second, one.in_flight))
    plain = [one for one in by_speed if not one.compressed]
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


def exchange_verdict(predictions: Sequence[Prediction]) -> str:
    """A sentence that says whether an exchange every few steps pays, from the fastest of predictions with replicas."""
    winner = max(predictions, key=lambda prediction: prediction.samples_per_second)
    exchange = winner.exchange
    assert exchange is not None, "only replicas exchange"
    where = f"at {bandwidth_text(winner.bandwidth)} with {winner.codec}"
    adds = f"{where} the exchange adds {exchange.adds:.3g} s to a step of {winner.seconds - exchange.adds:.3g} s"
    gain = exchange.samples_per_second_every / winner.samples_per_second
    if gain < PAYS:
        return f"{adds}; every {exchange.every} steps it gains less than {PAYS - 1:.0%}, so every step is enough"
    return (
        f"{adds}; every {exchange.every} steps pays: {exchange.samples_per_second_every:.3g} samples/s in place of "
        f"{winner.samples_per_second:.3g}, {gain:.2f}x"
    )


def bandwidth_text(bits: float) -> str:
    """A bandwidth as text, such as 100mbit."""
    if math.isinf(bits):
        return "unlimited bandwidth"
    for unit, scale in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if bits >= scale:
            return f"{bits / scale:.3g}{unit}" if bits / scale < 1000 else f"{bits / scale:.0f}{unit}"
    return f"{bits:.0f}bit"
