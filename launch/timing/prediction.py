"""Predictions for a pipeline over slow links, from the simulation: speed, needed bandwidth, the best schedule."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from thinwire.compress import parse
from thinwire.launch.timing.exchange import NO_COMPRESSION, UNCOMPRESSED, ExchangeTime, time_exchange
from thinwire.launch.timing.network import Link, Network
from thinwire.launch.timing.shared_wires import time_over
from thinwire.launch.timing.step_time import Course
from thinwire.launch.timing.timetable import timetable
from thinwire.launch.timing.workload import Workload, label
from thinwire.pipeline.frames import CHANNELS
from thinwire.pipeline.options import CompressionOptions
from thinwire.pipeline.options.overrides import named
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
    """One pass; with replicas, one of the replica that takes longest."""
    exchange: ExchangeTime | None
    seconds: float
    passes: int = 1
    """Those of that replica."""

    def every(self, count: int) -> float:
        """Seconds of an average step if replicas exchange everything once in `count` steps."""
        adds = self.exchange.adds if self.exchange else 0.0
        return self.seconds - adds + adds / count


def run(workload: Workload, schedule: str, compression: CompressionOptions, network: Network) -> Course:
    """Simulate one pass; its processes are the workload's stages."""
    cut = workload.cut_for(schedule)
    table = timetable(schedule, cut.num_stages, cut.num_microbatches)
    channels = [cut.channel(name, compression, network) for name in CHANNELS]
    return time_over(network.wires, table, cut.compute(), *channels)


def step(workload: Workload, schedule: str, compression: CompressionOptions, network: Network) -> Step:
    """Simulate one optimizer step."""
    replicas = workload.replicas
    if replicas is None:
        course = run(workload, schedule, compression, network)
        return Step(course=course, exchange=None, seconds=course.seconds)
    # the exchange waits for the replica that takes longest, whatever the others do
    courses = []
    for replica in replicas.unlike(network.inside):
        of_it = workload.at(replicas.speeds.get(replica, 1.0)), schedule, replicas.codecs_of(replica, compression)
        courses.append((replicas.passes_of(replica), run(*of_it, network.of_replica(replica))))
    passes, course = max(courses, key=lambda each: each[0] * each[1].seconds)
    exchange = time_exchange(replicas, course, network)
    return Step(
        course=course,
        exchange=exchange,
        seconds=passes * course.seconds + exchange.adds,
        passes=passes,
    )


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
        samples_per_second_every=workload.samples / found.every(every),
    )


def label_of(workload: Workload, compression: CompressionOptions) -> str:
    """The codecs of a prediction: of the boundaries, and of the gradients between replicas if there are any."""
    replicas, common = workload.replicas, label(compression)
    if replicas is None:
        return common
    others: dict[str, list[int]] = {}
    for replica in sorted(replicas.codecs):
        others.setdefault(label(replicas.codecs_of(replica, compression)), []).append(replica)
    single = [f"{codecs} in {named(which)}" for codecs, which in others.items() if codecs != common]
    return ", ".join([common, *single, f"replicas {parse(replicas.gradients)}"])


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
    inside = {replica: replace(link, bandwidth=math.inf) for replica, link in network.inside.items()}
    unlimited = replace(network, bandwidth=math.inf, links=free, replicas=apart, inside=inside)
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


def hides_in_words(bandwidth: float, network: Network) -> str:
    """A sentence that says which bandwidth hides the wire: that one, as `needed_bandwidth` found it.

    Names the links of the network that have their own bandwidth.
    """
    hides = f"hides the wire ({HIDDEN:.0%} of full speed)"
    inside = sorted(replica for replica, link in network.inside.items() if link.bandwidth is not None)
    own = {"--link": _names(network.links)} if network.links else {}
    own |= {} if network.replicas.bandwidth is None else {"--replica-link": "those between replicas"}
    own |= {"--inside": f"those inside {named(inside)}"} if inside else {}
    options, kept = " and ".join(own), " and ".join(own.values())
    if math.isinf(bandwidth):
        make = "makes" if len(own) == 1 else "make"
        slow = re.sub("^those", "the links", kept)
        return f"never {hides}: {options} {make} {slow} too slow, at any bandwidth of the other links"
    needs = f"from {bandwidth_text(bandwidth)} up" if bandwidth else "at any bandwidth"
    return f"{hides} {needs}" + (f" of the links other than {kept}" if own else "")


def _names(links: Mapping[tuple[int, int], Link]) -> str:
    """Links by their stages, as --link names them."""
    both = [f"{a}-{b}" for a, b in links if a < b and (b, a) in links]
    return ", ".join([*both, *(f"{a}>{b}" for a, b in links if (b, a) not in links)])


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
