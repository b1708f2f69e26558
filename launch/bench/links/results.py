"""The results of a link bench as tables: speeds, ratios, bytes, times, and the LIMIT with measured links and codecs."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from thinwire.launch.plan.places import real_placement
from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.shared.control_groups import cores
from thinwire.launch.shared.links import Network
from thinwire.launch.shared.tables import Table, Value, document
from thinwire.launch.timing.exchange_time import ReplicaWork, seconds_alone, time_exchange
from thinwire.launch.timing.step_time import ChannelTiming, Compute, Course, time_step
from thinwire.launch.timing.timetable import timetable
from thinwire.pipeline.frames import CHANNELS, ChannelName
from thinwire.pipeline.measuring.meters import SECTIONS
from thinwire.pipeline.measuring.probe import LinkSpeed
from thinwire.pipeline.replicas.layout import FLAT, TILES

REFERENCE = "none"
BETWEEN = ", replicas "
"""In the name of a contender: what comes before the codec of the gradients between replicas."""
_SHOWN_TASKS = ("forward", "backward", "optimizer")
EPOCHS = 10
"""Epochs of the run whose speed is computed for codecs with first visits: those cost more than later visits."""

THROUGHPUT = {
    10e9: {"fp32": 3.8, "fw3 bw6": 4.0, "fw4 bw8": 4.0},
    1e9: {"fp32": 3.2, "fw3 bw6": 4.0, "fw4 bw8": 3.9},
    500e6: {"fp32": 2.7, "fw3 bw6": 3.9, "fw4 bw8": 3.9},
    300e6: {"fp32": 1.8, "fw3 bw6": 3.8, "fw4 bw8": 3.8},
    100e6: {"fp32": 0.5, "fw3 bw6": 3.4, "fw4 bw8": 3.0},
}
"""Table 2 of 2206.01299, AQ-SGD: sequences a second by bandwidth (bits a second) and method."""

RATIOS = {10e9: 0.116, 1e9: 1.16, 500e6: 2.3, 300e6: 3.9, 100e6: 11.6}
"""Wire time of an uncompressed activation over its forward compute, by bandwidth, in that table."""

_HERE = LinkSpeed(goodput=float("inf"), latency=0.0)
"""The link between two stages of one process."""


@dataclass(frozen=True)
class Contest:
    """The measurements of all processes at one bandwidth, in rank order."""

    bandwidth: float | None
    """Mbit/s of every link; None is unshaped."""
    processes: Sequence[Mapping[str, Any]]
    size: int = 0
    """Processes of each pipeline; 0 if all are of one."""
    first: int = 0
    """The rank of the first of these processes."""

    @classmethod
    def read(cls, folder: Path, index: int, num_processes: int, bandwidth: float | None, size: int) -> Contest:
        """Read the files that the processes wrote for one bandwidth."""
        files = [folder / f"contest-{index}-{rank}.json" for rank in range(num_processes)]
        return cls(bandwidth, [json.loads(file.read_text()) for file in files], size)

    @property
    def pipeline(self) -> Sequence[Mapping[str, Any]]:
        """The measurements of the first pipeline."""
        return self.processes[: self.size or len(self.processes)]

    @property
    def replicas(self) -> list[Contest]:
        """The same contest in the processes of each replica."""
        size = self.size or len(self.processes)
        return [
            replace(self, processes=self.processes[first : first + size], first=first)
            for first in range(0, len(self.processes), size)
        ]

    @property
    def contenders(self) -> list[str]:
        """The names of the contenders, in the order of turns."""
        return list(dict.fromkeys(turn["contender"] for turn in self.processes[0]["turns"]))

    def seconds(self, contender: str, visit: str = "later") -> float:
        """Median seconds of a step in its slowest process. `visit` is `first`, or `later` for samples seen before.

        NaN without such a step: there were too few samples for a first visit in these turns.
        """
        by_process = [
            [step["seconds"] for step in self._steps(process, contender, visit)] for process in self.processes
        ]
        slowest = [max(step) for step in zip(*by_process, strict=True)]
        return float(statistics.median(slowest)) if slowest else math.nan

    def sections(self, contender: str) -> list[dict[str, float]]:
        """Median seconds of a step by section, one dict for each process; the dicts of plain torch are empty."""
        return [
            {name: statistics.median(step["sections"][name] for step in steps) for name in steps[0]["sections"]}
            for process in self.processes
            if (steps := list(self._steps(process, contender)))
        ]

    def compute(self) -> dict[tuple[int, str], float]:
        """Seconds by (stage, task): the median of each Thinwire contender, and the least of these medians.

        Sending slows the compute on the same core, so the least median is closest to the compute alone. Each bandwidth
        has its own, because the other work of the machine changes from one bandwidth to the next.
        """
        least: dict[tuple[int, str], float] = {}
        for process in self.processes:
            for contender in self.contenders:
                found: dict[tuple[int, str], list[float]] = {}
                for step in self._steps(process, contender):
                    for stage, task, seconds in step["compute"]:
                        found.setdefault((stage, task), []).append(seconds)
                for key, values in found.items():
                    least[key] = min(statistics.median(values), least.get(key, float("inf")))
        return least

    def frames(self, contender: str) -> dict[tuple[int, str], tuple[int, int]]:
        """Frames and bytes of a step by (boundary, channel), for samples seen before; empty for plain torch.

        Those of the first pipeline, between its stages.
        """
        return {
            (boundary, channel): (frames, nbytes)
            for process in self.pipeline
            for boundary, channel, frames, nbytes in list(self._steps(process, contender))[-1]["frames"]
            if channel in CHANNELS
        }

    def sent(self, contender: str) -> int:
        """Bytes of a step over all links, for samples seen before; 0 for plain torch."""
        steps = [list(self._steps(process, contender))[-1] for process in self.processes]
        return sum(nbytes for step in steps for _, _, _, nbytes in step["frames"])

    def exchange(self, contender: str) -> list[dict[str, float]]:
        """Median seconds of the exchange of a step by section, of each process of the first pipeline."""
        return [
            {name: statistics.median(step["exchange"][name] for step in steps) for name in steps[0].get("exchange", {})}
            for process in self.pipeline
            if (steps := list(self._steps(process, contender)))
        ]

    def exchange_together(self, contender: str) -> list[float]:
        """Median seconds of the exchange of a step in each process of a pipeline, once all its replicas are there.

        That is the exchange of the replica that waits least for the others, because it comes last.
        """
        size, found = len(self.pipeline), []
        for place in range(size):
            replicas = [self._steps(process, contender) for process in self.processes[place::size]]
            spent = [
                sum(min(told, key=lambda sections: sections["neighbour"]).values())
                for told in zip(*([step["exchange"] for step in steps] for steps in replicas), strict=True)
            ]
            found.append(statistics.median(spent))
        return found

    def links(self) -> dict[tuple[int, int], LinkSpeed]:
        """The speed of every link in each direction, by (sending process, receiving process)."""
        return {
            (link["source"], link["target"]): LinkSpeed(**{field.name: link[field.name] for field in fields(LinkSpeed)})
            for link in self.processes[0]["links"]
        }

    def _steps(self, process: Mapping[str, Any], contender: str, visit: str = "later") -> Iterable[Mapping[str, Any]]:
        for turn in process["turns"]:
            if turn["contender"] == contender:
                yield from turn["later"] if visit == "later" else [turn["first"]] * turn["new"]


def simulated(contest: Contest, prepared: Prepared, *, free_codecs: bool) -> dict[str, float]:
    """Simulated seconds of a step for each Thinwire contender, with the measured compute and links.

    With `free_codecs`, codecs take no time and the result is the LIMIT; else they take the measured time. The loss is
    part of the last stage's forward. The optimizer of a process follows its last backward or its exchange; if gradients
    are clipped, those of all processes.
    """
    pipeline, compute = prepared.recipe.pipeline, contest.compute()
    table = timetable(pipeline.schedule, pipeline.num_stages, pipeline.num_processes, pipeline.num_microbatches)
    optimizers = [0.0] * pipeline.num_processes
    for stage, process in real_placement(prepared.recipe).process_of.items():
        optimizers[process] += compute[stage, "optimizer"]
    clips = prepared.recipe.optimizer.max_grad_norm is not None
    found = {}
    for contender in contest.contenders:
        if any(contest.sections(contender)):  # not plain torch, which reports no sections
            # replicas have compute and may have codecs of their own, and all wait for the slowest
            courses = [
                time_step(
                    table,
                    _spent(replica, pipeline.num_stages),
                    *(_channel(replica, contender, name, prepared, free_codecs) for name in CHANNELS),
                )
                for replica in contest.replicas
            ]
            course = max(courses, key=lambda course: course.seconds)
            between = contender.partition(BETWEEN)[2] or REFERENCE
            apart = [] if free_codecs else contest.exchange(contender)
            ends = ends_of_processes(prepared, course, between, contest.links(), apart)
            if clips:
                ends = [max(ends)] * len(ends)
            found[contender] = max(end + update for end, update in zip(ends, optimizers, strict=True))
    return found


def _spent(replica: Contest, num_stages: int) -> Compute:
    """The compute of a micro-batch in each stage of a replica."""
    compute, stages = replica.compute(), range(num_stages)
    return Compute(
        forward=[compute[stage, "forward"] + compute.get((stage, "loss"), 0.0) for stage in stages],
        backward=[compute[stage, "backward"] + compute.get((stage, "weights"), 0.0) for stage in stages],
    )


def _channel(
    contest: Contest, contender: str, name: ChannelName, prepared: Prepared, free_codecs: bool
) -> ChannelTiming:
    """One direction over all boundaries of one replica, with the frames, links and codecs measured there."""
    frames, links, first = contest.frames(contender), contest.links(), contest.first
    where = real_placement(prepared.recipe).process_of
    boundaries = range(prepared.recipe.num_boundaries)
    ends = [(where[low], where[low + 1]) for low in boundaries]
    ends = ends if name == "activations" else [pair[::-1] for pair in ends]
    across = [links.get((source + first, target + first), _HERE) for source, target in ends]
    encode, decode = [[0.0] * len(where)] * 2 if free_codecs else _codec_seconds(contest, contender, prepared)
    return ChannelTiming(
        nbytes=[frames[low, name][1] / frames[low, name][0] for low in boundaries],
        bandwidth=[8 * link.goodput for link in across],
        latency=[link.latency for link in across],
        duplex=[link.duplex for link in across],
        encode=[encode[source] for source, _ in ends],
        decode=[decode[target] for _, target in ends],
    )


def _codec_seconds(contest: Contest, contender: str, prepared: Prepared) -> list[list[float]]:
    """Seconds for encoding and for decoding a frame on each process, the mean of both channels."""
    where, frames = real_placement(prepared.recipe).process_of, contest.frames(contender)
    sent, received = [0] * len(contest.pipeline), [0] * len(contest.pipeline)
    for (boundary, name), (count, _) in frames.items():
        low, high = where[boundary], where[boundary + 1]
        source, target = (low, high) if name == "activations" else (high, low)
        sent[source] += count
        received[target] += count
    sections = zip(contest.sections(contender)[: len(sent)], contest.exchange(contender), strict=True)
    spent_on = [{name: spent[name] - apart.get(name, 0.0) for name in spent} for spent, apart in sections]
    return [
        [spent[section] / max(1, count) for spent, count in zip(spent_on, counts, strict=True)]
        for section, counts in (("encode", sent), ("decode", received))
    ]


def as_document(
    contests: Sequence[Contest], prepared: Prepared, ratios: Mapping[float, float], environment: Mapping[str, Any]
) -> dict[str, Any]:
    """All results as tables. `ratios` are those of Table 2 of 2206.01299 if the contests follow them, else empty."""
    limits, predicted = (
        [simulated(contest, prepared, free_codecs=free) for contest in contests] for free in (True, False)
    )
    named = [f"like {bandwidth / 1e6:g} Mbps" for bandwidth in ratios]
    names = ["unshaped", *(named or [f"{contest.bandwidth:.10g} Mbit/s" for contest in contests[1:]])]
    results = dict(zip(names, contests, strict=True))
    tables = [
        _speeds(prepared, results, limits, predicted),
        _sections(results),
        _exchanges(prepared, results),
        _visits(results, prepared.recipe.batch_size),
        _beside_table_2(contests[1:], ratios),
        _conditions(results),
    ]
    raw = [{"bandwidth": contest.bandwidth, "processes": contest.processes} for contest in contests]
    shown = [table for table in tables if table.rows]
    return document(f"bench of {prepared.recipe.name}", shown, **environment, measured=raw)


def _speeds(
    prepared: Prepared,
    results: Mapping[str, Contest],
    limits: Sequence[Mapping[str, float]],
    predicted: Sequence[Mapping[str, float]],
) -> Table:
    samples, free = prepared.recipe.batch_size, next(iter(results.values())).seconds(REFERENCE)
    processes, available = prepared.recipe.num_processes, cores()
    alone = " The LIMIT gives every process a core of its own, and here"
    sharing = f"{alone} {processes} processes shared {available}." if processes > available else ""
    rows: list[list[Value]] = []
    for (name, contest), limit, simulation in zip(results.items(), limits, predicted, strict=True):
        for contender in contest.contenders:
            seconds, least, guess = contest.seconds(contender), limit.get(contender), simulation.get(contender)
            sent = contest.sent(contender)
            gain = contest.seconds(REFERENCE) / seconds if REFERENCE in contest.contenders else None
            rows.append(
                [
                    *(name, contender, samples / seconds, gain, free / seconds),
                    samples / least if least else None,
                    least / seconds if least else None,
                    guess / seconds if guess else None,
                    sent / 1e6 if sent else None,
                ]
            )
    return Table(
        f"{prepared.recipe.name}: {prepared.recipe.pipeline.schedule}, {samples} samples a step",
        ["links", "who", "samples/s", "x none", "of unshaped", "LIMIT", "of LIMIT", "predicted", "MB a step"],
        rows,
        note="Medians. x none: speed over that of Thinwire uncompressed. of unshaped: speed over that of Thinwire "
        "uncompressed on unshaped links. LIMIT: samples/s of the schedule with the compute and goodput measured here, "
        "and codecs that cost nothing. predicted: simulated seconds, with the measured codec times, over measured "
        f"seconds.{sharing}",
    )


def _sections(results: Mapping[str, Contest]) -> Table:
    rows: list[list[Value]] = [
        [name, contender, process, *(1e3 * spent[section] for section in SECTIONS), 1e3 * (total - sum(spent.values()))]
        for name, contest in results.items()
        for contender in contest.contenders
        for total in [contest.seconds(contender)]
        for process, spent in enumerate(contest.sections(contender))
        if spent
    ]
    columns = ["links", "who", "process", *SECTIONS, "other"]
    return Table(
        "where the time of a step goes, ms of each process",
        columns,
        rows,
        note="other: the rest of a step, such as reading samples, clipping, and waiting for the slowest process at the "
        "end",
    )


def _exchanges(prepared: Prepared, results: Mapping[str, Contest]) -> Table:
    rows: list[list[Value]] = []
    for name, contest in results.items():
        for contender in contest.contenders:
            between = contender.partition(BETWEEN)[2] or REFERENCE
            limits = limits_of_exchange(prepared, between, contest.links())
            found = contest.exchange_together(contender) if limits else []
            for process, (seconds, least) in enumerate(zip(found, limits, strict=True)):
                rows.append([name, contender, process, 1e3 * seconds, 1e3 * least, least / seconds])
    return Table(
        "the exchange between replicas, ms of each process of a pipeline",
        ["links", "who", "process", "exchange", "LIMIT", "of LIMIT"],
        rows,
        note="Medians of the replica that comes last, so waiting for a slower one does not count. LIMIT: with the "
        "goodput measured here, and codecs that cost nothing.",
    )


def _visits(results: Mapping[str, Contest], samples: int) -> Table:
    rows: list[list[Value]] = []
    for name, contest in results.items():
        for contender in contest.contenders:
            if "aqsgd" in contender:
                first, later = (contest.seconds(contender, visit) for visit in ("first", "later"))
                run = (first + (EPOCHS - 1) * later) / EPOCHS
                speeds = [samples / each for each in (first, later, run)]
                rows.append([name, contender, *(None if math.isnan(speed) else speed for speed in speeds)])
    return Table(
        f"AQ-SGD, samples/s: first visits, later ones, a run of {EPOCHS} epochs",
        ["links", "who", "first", "later", "run"],
        rows,
        note="Empty where all samples had been visited before: raise data.limit, or lower --repetitions.",
    )


def _conditions(results: Mapping[str, Contest]) -> Table:
    stages = sorted({stage for stage, _ in next(iter(results.values())).compute()})
    columns = [f"stage {stage} {task}, ms" for stage in stages for task in _SHOWN_TASKS]
    rows: list[list[Value]] = []
    for name, contest in results.items():
        links, compute = contest.links().values(), contest.compute()
        goodput, latency, duplex = (
            statistics.median(getattr(link, field.name) for link in links) for field in fields(LinkSpeed)
        )
        spent = [1e3 * compute.get((stage, task), 0.0) for stage in stages for task in _SHOWN_TASKS]
        rows.append([name, 8e-6 * goodput, duplex, 1e3 * latency, *spent])
    return Table(
        "the measurements behind the LIMIT: links, and compute of a micro-batch",
        ["links", "goodput, Mbit/s", "share if both ways", "latency, ms", *columns],
        rows,
    )


def _beside_table_2(contests: Sequence[Contest], ratios: Mapping[float, float]) -> Table:
    """The speed-ups of 2206.01299 beside ours, at the same ratios of wire to compute."""
    ours = {"q(4)/q(8)": "fw4 bw8", "q(3)/q(6)": "fw3 bw6"}
    rows: list[list[Value]] = []
    for network, contest in zip(ratios, contests, strict=bool(ratios)):
        for contender in contest.contenders:
            published = THROUGHPUT[network]
            paper = published.get(ours.get(contender, ""))
            if paper is not None and REFERENCE in contest.contenders:
                mine = contest.seconds(REFERENCE) / contest.seconds(contender)
                rows.append([network / 1e6, ratios[network], contender, paper / published["fp32"], mine])
    return Table(
        "beside Table 2 of 2206.01299: speed over uncompressed",
        ["Mbps there", "wire over forward", "codec", "published", "here"],
        rows,
        note="Published: 8 stages of GPT2-1.5B and 32 micro-batches; its uncompressed run is slower than its wire.",
    )


def ends_of_processes(
    prepared: Prepared,
    course: Course,
    between: str,
    links: Mapping[tuple[int, int], LinkSpeed],
    spent: list[dict[str, float]],
) -> list[float]:
    """When each process of a pipeline has the gradients of its step: after its last backward, or after its exchange.

    `between` is the codec of the gradients. `spent` are the measured seconds of codecs in an average step by section,
    of each process of a pipeline; it is empty if codecs cost nothing.
    """
    if prepared.recipe.replicas.count == 1:
        return course.done
    options = prepared.recipe.replicas
    every = options.sync.every if options.step_alone else 1
    work = replica_work(prepared, between)
    if spent:
        # each element is encoded as a part, and its sum by the owner; decoded as a part by the owner, and as a sum;
        # if all add up for themselves, it is encoded once, and decoded from everyone
        elements = max(work.elements)
        most = spent[work.elements.index(elements)]
        work = replace(
            work,
            encode=every * most["encode"] / elements / (1 if work.to_all else 1 + 1 / work.count),
            decode=every * most["decode"] / elements / (work.count if work.to_all else 2),
        )
    exchange = time_exchange(work, course, network_of(prepared, links))
    return list(exchange.ends) if every == 1 else [end + exchange.adds / every for end in course.done]


def limits_of_exchange(prepared: Prepared, between: str, links: Mapping[tuple[int, int], LinkSpeed]) -> Sequence[float]:
    """Seconds of the exchange of each process in each step, with codecs that cost nothing; none where it is not so."""
    options = prepared.recipe.replicas
    if options.count == 1 or options.step_alone:
        return []
    work, network = replica_work(prepared, between), network_of(prepared, links)
    return [seconds_alone(work, process, network) for process in range(len(work.elements))]


def network_of(prepared: Prepared, links: Mapping[tuple[int, int], LinkSpeed]) -> Network:
    """The slowest of the measured links between replicas."""
    size = prepared.recipe.pipeline.num_processes
    across = [speed for (source, target), speed in links.items() if source % size == target % size]
    return Network(
        bandwidth=8 * min(speed.goodput for speed in across),
        latency=max(speed.latency for speed in across),
        duplex=min(speed.duplex for speed in across),
    )


def replica_work(prepared: Prepared, gradients: str) -> ReplicaWork:
    """What the replicas of a recipe exchange with a codec of gradients."""
    recipe = prepared.recipe
    elements = [0] * recipe.pipeline.num_processes
    for (_, process), trained in zip(
        sorted(real_placement(recipe).process_of.items()), weights_of(prepared), strict=True
    ):
        elements[process] += trained
    return ReplicaWork(
        count=recipe.replicas.count,
        gradients=gradients,
        elements=tuple(elements),
        layout=FLAT if recipe.replicas.sync.every == 1 else TILES,
        to_all=recipe.replicas.step_alone,
        # each step or round of a bench ends at a barrier: no later stage begins the next one before all have their sums
        clips=True,
    )


def weights_of(prepared: Prepared) -> list[int]:
    """The weights that each stage trains, tied ones once."""
    layers = prepared.blueprint.on_meta
    parts = [set(chain(*(layer.parameters() for layer in layers[cut.start : cut.stop]))) for cut in prepared.cuts]
    return [sum(each.numel() for each in part if each.requires_grad) for part in parts]
