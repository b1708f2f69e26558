"""`thinwire predict`: the speed of a pipeline over slow links, for several codecs and schedules."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from thinwire.errors.words import numbered
from thinwire.launch.run import recipe
from thinwire.launch.run.recipe import Recipe
from thinwire.launch.shared.arguments import Parser, at_least_one, positive, share
from thinwire.launch.shared.exit_codes import OK
from thinwire.launch.shared.links import parse_bandwidth, parse_latency
from thinwire.launch.shared.strict_json import dumps
from thinwire.launch.shared.tables import show
from thinwire.launch.timing.network import WIRES, Link, Network
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.options.overrides import ReplicaCodecs
from thinwire.pipeline.options.pipeline import PipelineOptions

if TYPE_CHECKING:
    from thinwire.launch.predict.answer import Answer
    from thinwire.launch.timing.workload import Workload

PROG = "thinwire predict"
BANDWIDTHS = "10gbit,1gbit,500mbit,300mbit,100mbit"
RARELY = 30
"""Steps from one exchange between replicas to the next, beside every step: as in SparseLoCo."""
COMPARED_CODECS = ("q(8)", "q(4)/q(8)", "q(3)/q(6)", "q(2)/q(4)")
"""Codecs compared by default, beside none and those of the recipe."""


def main(argv: Sequence[str]) -> int:
    """Predict, print tables or JSON, and return the exit status."""
    options, overrides = _options(argv)
    wanted = recipe.parse([options.recipe, *overrides], prog=PROG)
    from rich.console import Console

    predicted = _answer(options, wanted)
    if options.json:
        print(dumps(predicted.to_json(), indent=2))
        return OK
    console = Console()
    console.print(predicted.heading, highlight=False, soft_wrap=True, markup=False)
    show(predicted.tables)
    for line in (*predicted.verdicts, predicted.advice):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    return OK


def _answer(options: argparse.Namespace, wanted: Recipe) -> Answer:
    from thinwire.launch.predict.answer import answer
    from thinwire.launch.timing.exchange_time import NO_COMPRESSION
    from thinwire.launch.timing.profile import from_recipe
    from thinwire.launch.timing.workload import codec_pair, label
    from thinwire.pipeline.schedules import SCHEDULES

    replicas = wanted.replicas.count > 1
    if wanted.pipeline.num_stages < 2:
        raise OptionsError("a prediction needs links: pipeline.num_stages must be at least 2, got 1")
    _check_one_each(wanted.pipeline)
    _check_replicas(options, wanted)
    given = [codec_pair(text) for text in options.codec or (() if replicas else COMPARED_CODECS)]
    own = [] if wanted.compression.automatic else [wanted.compression]
    compared = {label(codec): codec for codec in (NO_COMPRESSION, *own, *given)}
    schedule = options.schedule or wanted.pipeline.schedule
    try:
        SCHEDULES[schedule]
    except OptionsError as error:  # the recipe's own is checked, so it is that of the option
        raise OptionsError([text.replace("pipeline.schedule", "--schedule", 1) for text in error.mistakes]) from error
    forward, backward = (value if value is None else value / 1e3 for value in (options.forward_ms, options.backward_ms))
    between = [*dict.fromkeys(("none", wanted.replicas.gradients, *options.replica_codec))] if replicas else []
    codecs = list(compared.values())
    workload = from_recipe(wanted, codecs, forward, backward, between)
    _check_schedule(schedule, workload)
    wrong = [f"{a}-{b}" for a, b in options.link if max(a, b) >= workload.num_stages]
    if wrong:
        raise OptionsError(
            f"--link must name two neighbouring stages in 0..{workload.num_stages - 1}, got {', '.join(wrong)}"
        )
    networks = [
        Network(
            bandwidth=bandwidth,
            latency=options.latency,
            duplex=options.duplex,
            links=options.link,
            wires=options.wires,
            replicas=options.replica_link,
        )
        for bandwidth in options.bandwidth
    ]
    own_every = wanted.replicas.sync.every
    every = options.every or (own_every if own_every > 1 else RARELY)
    return answer(workload, schedule, codecs, networks, options.max_in_flight, between, every)


def _check_one_each(pipeline: PipelineOptions) -> None:
    """Refuse a recipe with several stages in each process: the times of a prediction are those of processes."""
    count, each = pipeline.num_processes, pipeline.per_process
    if each > 1:
        raise OptionsError(
            f"a prediction needs a recipe with one stage in each process, got {each}; add --pipeline.num_stages "
            f"{count} --pipeline.stages_per_process 1 --pipeline.layers null --pipeline.schedule gpipe "
            f"--compression.boundaries '{{}}', and --schedule {pipeline.schedule} for {each} stages in each"
        )


def _check_schedule(schedule: str, workload: Workload) -> None:
    """Refuse a schedule that cannot run the work, or needs more stages than the model has layers."""
    from thinwire.pipeline.schedules import SCHEDULES

    spec = SCHEDULES[schedule]
    count = workload.num_stages * spec.stages_per_process
    mistakes = list(spec.mistakes(count, spec.stages_per_process, workload.num_microbatches))
    if workload.layers is not None and count > workload.layers:
        mistakes.append(
            f"{schedule} cuts the model into {count} stages, {spec.stages_per_process} for each of "
            f"{workload.num_stages} processes, but it has {workload.layers} layers; take a smaller "
            f"--pipeline.num_stages or another --schedule"
        )
    if mistakes:
        raise OptionsError(mistakes)


def _check_replicas(options: argparse.Namespace, wanted: Recipe) -> None:
    """Raise OptionsError that names every option that does not fit the replicas of the recipe."""
    from thinwire.launch.timing.workload import check_replica_codecs

    check_replica_codecs(options.replica_codec)
    for_replicas = {
        "--replica-link": options.replica_link != Link(),
        "--replica-codec": options.replica_codec,
        "--every": options.every,
        "--wires host": options.wires == "host",
    }
    own = [replica for replica, each in wanted.replicas.overrides.items() if each.compression != ReplicaCodecs()]
    OptionsError.require(
        *(
            (wanted.replicas.count > 1 or not given, f"{name} needs replicas; add --replicas.count, such as 2")
            for name, given in for_replicas.items()
        ),
        (
            not own,
            f"a prediction takes all replicas for alike; remove compression from replicas.overrides, got that of "
            f"{numbered('replica', own)}",
        ),
    )


def _options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = make_parser()
    options, overrides = parser.parse_known_args(argv)
    if (options.forward_ms is None) != (options.backward_ms is None):
        parser.error("give --forward-ms and --backward-ms together: a given time beside a measured one says nothing")
    options.link = {pair: link for group in options.link for pair, link in group.items()}
    return options, overrides


def make_parser() -> Parser:
    """The options of the command itself."""
    parser = Parser(
        prog=PROG,
        usage=f"{PROG} RECIPE [options] [--field value ...]",
        description="Predict the speed of a pipeline over slow links. Options can override fields of the recipe, as "
        "in thinwire train.",
        allow_abbrev=False,
        takes_recipe=True,
    )
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="packaged name or path of a YAML file")
    for way in ("forward", "backward"):
        add(
            f"--{way}-ms",
            type=positive,
            help=f"milliseconds of one micro-batch {way} on one stage (default: measured on this machine)",
        )
    _add_links(add)
    _add_replicas(add)
    add("--schedule", help="a schedule of thinwire train, or your own as module:name (default: that of the recipe)")
    add(
        "--codec",
        nargs="+",
        action="extend",
        metavar="FW/BW",
        help="codecs of activations/gradients, such as 'q(4)/q(8)' (default: some examples)",
    )
    add(
        "--max-in-flight",
        type=positive,
        default=math.inf,
        help="the number of micro-batches that fit in the memory of a process",
    )
    add("--json", action="store_true", help="print JSON")
    return parser


def _add_links(add: Callable[..., argparse.Action]) -> None:
    """The options of links."""
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
    add(
        "--wires",
        choices=WIRES,
        default="pair",
        help="what the exchange between replicas has: pair, a link to each replica; host, one uplink for all that a "
        "host sends (default: %(default)s)",
    )


def _add_replicas(add: Callable[..., argparse.Action]) -> None:
    """The options of replicas: their links, codecs, speed and exchanges."""
    add(
        "--replica-link",
        type=_replica_link,
        default=Link(),
        metavar="BANDWIDTH[,LATENCY]",
        help="links between replicas with their own bandwidth or latency (default: as the others)",
    )
    add(
        "--replica-codec",
        nargs="+",
        action="extend",
        default=[],
        metavar="CODEC",
        help="codecs of the gradients between replicas, beside none and that of the recipe, such as 'ef(q(4))'",
    )
    add(
        "--every",
        type=at_least_one,
        help="steps from one exchange between replicas to the next, to compare with every step (default: "
        "replicas.sync.every of the recipe if above 1, else 30)",
    )


def _bandwidths(text: str) -> list[float]:
    return [_bandwidth(part) for part in text.split(",")]


def _bandwidth(text: str) -> float:
    """Bits a second."""
    with _refusal():
        rate = parse_bandwidth(text)
    if rate == 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text!r}")
    return math.inf if rate is None else 1e6 * rate


def _latency(text: str) -> float:
    """Seconds."""
    with _refusal():
        return parse_latency(text) / 1e3


@contextmanager
def _refusal() -> Iterator[None]:
    """Raise OptionsError as an error of argparse, which adds the name of the option."""
    try:
        yield
    except OptionsError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _replica_link(text: str) -> Link:
    rate, comma, delay = text.partition(",")
    return Link(bandwidth=_bandwidth(rate), latency=_latency(delay) if comma else None)


def _link(text: str) -> dict[tuple[int, int], Link]:
    found = re.fullmatch(r"(\d+)([->])(\d+):([^,]+)(?:,(.+))?", text)
    if found is None or abs(int(found[1]) - int(found[3])) != 1:
        raise argparse.ArgumentTypeError(
            f"must be two neighbouring stages such as 1-2:20mbit or 2>1:5mbit, got {text!r}"
        )
    source, target = int(found[1]), int(found[3])
    link = Link(bandwidth=_bandwidth(found[4]), latency=_latency(found[5]) if found[5] else None)
    return {(source, target): link} if found[2] == ">" else {(source, target): link, (target, source): link}
