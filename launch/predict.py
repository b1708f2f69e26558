"""`thinwire predict`: how fast a pipeline will be over which links, with which codec and schedule, and why."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from thinwire.launch.run import recipe
from thinwire.launch.shared import tables
from thinwire.launch.shared.arguments import Parser, positive, share
from thinwire.launch.shared.exit_codes import OK
from thinwire.launch.shared.links import parse_bandwidth, parse_latency
from thinwire.launch.shared.tables import document
from thinwire.launch.timing import published
from thinwire.launch.timing.prediction import (
    HIDDEN,
    NO_COMPRESSION,
    Prediction,
    bandwidth_text,
    best,
    hides_in_words,
    needed_bandwidth,
    possible,
    predict_each,
    verdict,
)
from thinwire.launch.timing.workload import Link, Network, Workload, codec_pair, label
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.options import CompressionOptions
from thinwire.pipeline.schedules import SCHEDULES

PROG = "thinwire predict"
BANDWIDTHS = "10gbit,1gbit,500mbit,300mbit,100mbit"
COMPARED_CODECS = ("q(8)", "q(4)/q(8)", "q(3)/q(6)", "q(2)/q(4)")
"""Compared where nobody asks for others, beside none and the recipe's own."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """All that was asked about one workload."""

    workload: Workload
    predictions: list[Prediction]
    """With the schedule asked for, by bandwidth and codec."""
    needed: dict[str, float]
    """By codec: the bandwidth, bits a second, below which the wire is the bottleneck."""
    schedules: list[Prediction]
    """Every schedule that can run this, with every codec, at the lowest bandwidth."""
    best: Prediction | None
    """The fastest of them within the memory given; None where none fits."""
    verdicts: list[str]
    """Whether compression pays, a sentence a bandwidth."""


def answer(
    workload: Workload,
    schedule: str,
    codecs: Sequence[CompressionOptions],
    networks: Sequence[Network],
    max_in_flight: float = math.inf,
) -> Answer:
    """Ask everything about one workload. `networks` differ in bandwidth; `codecs` begin with the uncompressed one."""
    by_network = [predict_each(workload, schedule, codecs, network) for network in networks]
    slowest = min(networks, key=lambda network: network.bandwidth)
    by_schedule = [predict_each(workload, name, codecs, slowest) for name in possible(workload, SCHEDULES)]
    schedules = [prediction for row in by_schedule for prediction in row]
    return Answer(
        workload=workload,
        predictions=[prediction for row in by_network for prediction in row],
        needed={label(codec): needed_bandwidth(workload, schedule, codec, networks[0]) for codec in codecs},
        schedules=schedules,
        best=best(schedules, max_in_flight),
        verdicts=[verdict(row) for row in by_network],
    )


def main(argv: Sequence[str]) -> int:
    """Predict, and print tables or JSON; the exit status."""
    options, overrides = _options(argv)
    if options.like:
        _show_published(options.json)
    else:
        _show(_answer(options, overrides), options)
    return OK


def _answer(options: argparse.Namespace, overrides: Sequence[str]) -> Answer:
    from thinwire.launch.timing.profile import from_recipe

    wanted = recipe.parse([options.recipe, *overrides], prog=PROG)
    if wanted.pipeline.num_stages < 2:
        raise OptionsError("a prediction needs links: pipeline.num_stages must be at least 2, got 1")
    given = [codec_pair(text) for text in options.codec or COMPARED_CODECS]
    own = [] if wanted.compression.automatic else [wanted.compression]
    codecs = list({label(codec): codec for codec in (NO_COMPRESSION, *own, *given)}.values())
    schedule = options.schedule or wanted.pipeline.schedule
    seconds = [value if value is None else value / 1e3 for value in (options.forward_ms, options.backward_ms)]
    workload = from_recipe(wanted, codecs, *seconds)
    spec = SCHEDULES[schedule]
    count = workload.num_stages * spec.stages_per_process
    if mistakes := spec.mistakes(count, spec.stages_per_process, workload.num_microbatches):
        raise OptionsError(mistakes)
    wrong = [f"{a}-{b}" for a, b in options.link if max(a, b) >= workload.num_stages]
    if wrong:
        raise OptionsError(
            f"--link must name stages in 0..{workload.num_stages - 1} beside each other, got {', '.join(wrong)}"
        )
    networks = [
        Network(bandwidth=bandwidth, latency=options.latency, duplex=options.duplex, links=options.link)
        for bandwidth in options.bandwidth
    ]
    return answer(workload, schedule, codecs, networks, options.max_in_flight)


# --- showing ----------------------------------------------------------------------------------------------------------


def _show(found: Answer, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(as_json(found), indent=2, allow_nan=False))
        return
    console, workload = Console(), found.workload
    times = ", ".join(
        f"{1e3 * forth:.3g}+{1e3 * back:.3g}" for forth, back in zip(workload.forward, workload.backward, strict=True)
    )
    console.print(
        f"{workload.name}: {workload.num_stages} stages, {workload.num_microbatches} micro-batches of "
        f"{workload.microbatch_size}; forward+backward ms a stage: {times}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_throughput_table(found.predictions))
    for codec, bandwidth in found.needed.items():
        console.print(f"{escape(codec)} {hides_in_words(bandwidth, options.link)}", highlight=False, soft_wrap=True)
    for sentence in found.verdicts:
        console.print(escape(sentence), highlight=False, soft_wrap=True)
    console.print(_stages_table(found.predictions))
    console.print(_schedules_table(found.schedules))
    limit = "" if math.isinf(options.max_in_flight) else f" with at most {options.max_in_flight:g} micro-batches held"
    if found.best is None:
        console.print(f"no schedule runs{limit}; raise --max-in-flight")
    else:
        at = bandwidth_text(found.best.bandwidth)
        console.print(
            f"best{limit} at {at}: {found.best.schedule} with {escape(found.best.codec)}, "
            f"{found.best.samples_per_second:.3g} samples/s, {found.best.in_flight:g} held",
            highlight=False,
            soft_wrap=True,
        )


def _throughput_table(predictions: Sequence[Prediction]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0, title="samples/s", title_justify="left")
    table.add_column("link", no_wrap=True)
    table.add_column("codec", overflow="fold")
    for header in ("samples/s", "x none", "of full", "step s"):
        table.add_column(header, justify="right", no_wrap=True)
    for one in predictions:
        table.add_row(
            bandwidth_text(one.bandwidth),
            escape(one.codec),
            f"{one.samples_per_second:.3g}",
            f"{one.speedup:.2f}",
            f"{one.of_unthrottled:.0%}",
            f"{one.seconds:.4g}",
        )
    return table


def _stages_table(predictions: Sequence[Prediction]) -> Table:
    """Where each stage's time goes at the lowest bandwidth."""
    slowest = min(one.bandwidth for one in predictions)
    title = f"share of the step each stage is busy / waits for the wire / idles, at {bandwidth_text(slowest)}"
    shown = [one for one in predictions if one.bandwidth == slowest]
    table = Table(box=SIMPLE_HEAD, padding=0, title=title, title_justify="left")
    table.add_column("stage", no_wrap=True)
    for one in shown:
        table.add_column(escape(one.codec), justify="right", overflow="fold")
    for stage in range(len(shown[0].busy)):
        table.add_row(
            str(stage),
            *(
                "/".join(f"{100 * part[stage] / one.seconds:.0f}" for part in (one.busy, one.wait, one.bubble))
                for one in shown
            ),
        )
    return table


def _schedules_table(predictions: Sequence[Prediction]) -> Table:
    """Every schedule with every codec, at one bandwidth."""
    codecs = list(dict.fromkeys(one.codec for one in predictions))
    title = f"samples/s of every schedule at {bandwidth_text(predictions[0].bandwidth)}"
    table = Table(box=SIMPLE_HEAD, padding=0, title=title, title_justify="left")
    table.add_column("schedule", no_wrap=True)
    table.add_column("held", justify="right")
    for codec in codecs:
        table.add_column(escape(codec), justify="right", overflow="fold")
    for name in dict.fromkeys(one.schedule for one in predictions):
        row = [one for one in predictions if one.schedule == name]
        table.add_row(name, f"{row[0].in_flight:g}", *(f"{one.samples_per_second:.3g}" for one in row))
    return table


def as_json(found: Answer) -> dict[str, Any]:
    """An answer as a document, and all of it beside; null is unlimited bandwidth, one never enough, or no schedule."""
    workload = found.workload
    everything = {
        "workload": {
            "name": workload.name,
            "num_stages": workload.num_stages,
            "num_microbatches": workload.num_microbatches,
            "microbatch_size": workload.microbatch_size,
            "forward": workload.forward,
            "backward": workload.backward,
            "codec_seconds": [
                {"channel": channel, "codec": codec, **asdict(cost)}
                for (channel, codec), cost in workload.costs.items()
            ],
        },
        "predictions": [_finite(one) for one in found.predictions],
        "needed_bandwidth": {codec: _number(bandwidth) for codec, bandwidth in found.needed.items()},
        "schedules": [_finite(one) for one in found.schedules],
        "best": None if found.best is None else _finite(found.best),
        "verdicts": found.verdicts,
    }
    return document(f"prediction of {workload.name}", _documented(found), **everything)


def _documented(found: Answer) -> list[tables.Table]:
    columns = ("link", "schedule", "codec", "samples/s", "x none", "of full", "s a step", "held")
    speeds, schedules = (
        [
            (
                *(bandwidth_text(one.bandwidth), one.schedule, one.codec, one.samples_per_second),
                *(one.speedup, one.of_unthrottled, one.seconds, one.in_flight),
            )
            for one in predictions
        ]
        for predictions in (found.predictions, found.schedules)
    )
    needed = [(codec, _number(1e-6 * bandwidth)) for codec, bandwidth in found.needed.items()]
    return [
        tables.Table("predicted speed", columns, speeds, "; ".join(found.verdicts)),
        tables.Table(f"the wire hides ({HIDDEN:.0%} of full speed) from", ("codec", "Mbit/s"), needed),
        tables.Table("every schedule on the slowest link", columns, schedules),
    ]


def _finite(one: Prediction) -> dict[str, Any]:
    return {**asdict(one), "bandwidth": _number(one.bandwidth)}


def _number(value: float) -> float | None:
    """A number as JSON has it: null is infinity."""
    return value if math.isfinite(value) else None


def _show_published(as_data: bool) -> None:
    """Tables 2 and 3 of 2206.01299 beside the simulation."""
    compared = {
        "Table 2, sequences/s": published.throughput_numbers(),
        "Table 2, share of the speed at 10 Gbps": published.share_numbers(),
        "Table 3, ms on the wire": published.wire_numbers(),
    }
    if as_data:
        shown = [
            tables.Table(
                f"2206.01299, {title}",
                ("Mbit/s", "method", "published", "predicted", "deviation"),
                [
                    (1e-6 * one.bandwidth, one.method, one.published, one.predicted, one.deviation)
                    for one in comparisons
                ],
            )
            for title, comparisons in compared.items()
        ]
        print(json.dumps(document("prediction of 2206.01299", shown), indent=2, allow_nan=False))
        return
    for title, comparisons in compared.items():
        table = Table(box=SIMPLE_HEAD, padding=0, title=f"2206.01299, {title}", title_justify="left")
        table.add_column("link")
        table.add_column("")
        for header in ("published", "predicted", "deviation"):
            table.add_column(header, justify="right")
        for one in comparisons:
            table.add_row(
                bandwidth_text(one.bandwidth),
                one.method,
                f"{one.published:.3g}",
                f"{one.predicted:.3g}",
                f"{one.deviation:+.0%}",
            )
        Console().print(table)


# --- reading ----------------------------------------------------------------------------------------------------------


def _options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(
        prog=PROG,
        usage=f"{PROG} RECIPE [options] [--field value ...]",
        description="Predict a pipeline's speed over slow links. Fields of the recipe can be overridden as for train.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("recipe", nargs="?", metavar="RECIPE", help="packaged name or path of a YAML file")
    add(
        "--forward-ms",
        type=positive,
        help="milliseconds of one micro-batch on one stage (default: measured on this machine)",
    )
    add(
        "--backward-ms",
        type=positive,
        help="milliseconds of one micro-batch on one stage (default: measured on this machine)",
    )
    add(
        "--bandwidth",
        type=_bandwidths,
        default=BANDWIDTHS,
        help="bandwidths of every link, in each direction (default: %(default)s)",
    )
    add("--latency", type=_latency, default="0ms", help="latency of every link in one direction (default: %(default)s)")
    add(
        "--duplex",
        type=share,
        default=1.0,
        help="share of a link's bandwidth that remains while its other direction is busy (default: %(default)s)",
    )
    add(
        "--link",
        type=_link,
        nargs="+",
        action="extend",
        default=[],
        metavar="A-B:BANDWIDTH[,LATENCY]",
        help="links with their own bandwidth or latency, named by their stages: 1-2:20mbit in both directions, "
        "2>1:5mbit,30ms in one",
    )
    add("--schedule", choices=SCHEDULES, help="default: the recipe's")
    add("--codec", nargs="+", action="extend", metavar="FW/BW", help="such as 'q(4)/q(8)' (default: a few)")
    add(
        "--max-in-flight",
        type=positive,
        default=math.inf,
        help="the number of micro-batches that fit in the memory of a process",
    )
    add("--like", choices=["aqsgd"], help="compare this prediction with the published tables of 2206.01299")
    add("--json", action="store_true", help="print JSON")
    options, overrides = parser.parse_known_args(argv)
    if options.recipe is None and options.like is None:
        parser.error("give a RECIPE, or --like aqsgd")
    if options.like:
        alone = parser.parse_args(["--like", options.like, *["--json"] * options.json])
        if options != alone or overrides:
            parser.error(
                f"--like {options.like} shows a published workload: no RECIPE or option but --json goes with it"
            )
    options.link = {pair: link for group in options.link for pair, link in group.items()}
    return options, overrides


def _bandwidths(text: str) -> list[float]:
    return [_bandwidth(part) for part in text.split(",")]


def _bandwidth(text: str) -> float:
    """Bits a second."""
    rate = _told(parse_bandwidth, text)
    if rate == 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text!r}")
    return math.inf if rate is None else 1e6 * rate


def _latency(text: str) -> float:
    """Seconds."""
    return _told(parse_latency, text) / 1e3


def _told(read: Callable[[str], T], text: str) -> T:
    """What `read` makes of an option, its refusal being argparse's."""
    try:
        return read(text)
    except OptionsError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _link(text: str) -> dict[tuple[int, int], Link]:
    found = re.fullmatch(r"(\d+)([->])(\d+):([^,]+)(?:,(.+))?", text)
    if found is None or abs(int(found[1]) - int(found[3])) != 1:
        raise argparse.ArgumentTypeError(
            f"must be two neighbouring stages such as 1-2:20mbit or 2>1:5mbit, got {text!r}"
        )
    source, target = int(found[1]), int(found[3])
    link = Link(bandwidth=_bandwidth(found[4]), latency=_latency(found[5]) if found[5] else None)
    return {(source, target): link} if found[2] == ">" else {(source, target): link, (target, source): link}
