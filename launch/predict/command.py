"""`thinwire predict`: the speed of a pipeline over slow links, for several codecs and schedules."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from thinwire.launch.recipe import recipe
from thinwire.launch.recipe.recipe import Recipe
from thinwire.launch.shared.arguments import Parser, positive, share
from thinwire.launch.shared.exit_codes import OK
from thinwire.launch.shared.links import BANDWIDTHS, Network, parse_bandwidth, parse_latency
from thinwire.launch.shared.progress import showing
from thinwire.launch.shared.strict_json import dumps
from thinwire.launch.shared.tables import say, show
from thinwire.pipeline.errors import OptionsError

if TYPE_CHECKING:
    from thinwire.launch.predict.answer import Answer

PROG = "thinwire predict"


def main(argv: Sequence[str]) -> int:
    """Predict, print tables or JSON, and return the exit status."""
    parser = make_parser()
    options, overrides = parser.parse_known_args(argv)
    if (options.forward_ms is None) != (options.backward_ms is None):
        parser.error("give --forward-ms and --backward-ms together: a given time beside a measured one says nothing")
    if options.forward_ms is not None and (options.memory or options.measured):
        parser.error("--memory and --measured are of measured layers: leave out --forward-ms and --backward-ms")
    wanted = recipe.parse([options.recipe, *overrides], prog=PROG)
    predicted = _answer(options, wanted)
    if options.json:
        print(dumps(predicted.to_json(), indent=2))
        return OK
    say(predicted.heading)
    show(predicted.tables)
    say(*predicted.verdicts, predicted.advice, *predicted.best_cut)
    return OK


def _answer(options: argparse.Namespace, wanted: Recipe) -> Answer:
    from thinwire.launch.plan.prepare import prepare
    from thinwire.launch.predict.answer import Answer
    from thinwire.launch.predict.cuts import cuts_of, limits_of, places_of
    from thinwire.launch.predict.profile import workload_of
    from thinwire.launch.timing.prediction import mistakes_of
    from thinwire.launch.timing.workload import NO_COMPRESSION, as_sent, codec_pair, label
    from thinwire.models.precision import threads
    from thinwire.pipeline.schedules import SCHEDULES

    pipeline, replicas = wanted.pipeline, wanted.replicas.count
    count, each = pipeline.num_processes, pipeline.per_process
    OptionsError.require(
        (pipeline.num_stages > 1, "a prediction needs links: pipeline.num_stages must be at least 2, got 1"),
        (replicas == 1, f"a prediction is of one pipeline; add --replicas.count 1, got {replicas}"),
        (
            each == 1,  # the times of a prediction are those of processes
            f"a prediction needs a recipe with one stage in each process, got {each}; add --pipeline.num_stages "
            f"{count} --pipeline.stages_per_process 1 --pipeline.layers null --pipeline.schedule gpipe "
            f"--compression.boundaries '{{}}', and --schedule {pipeline.schedule} for {each} stages in each",
        ),
    )
    asked = [codec_pair(text) for text in options.codec or wanted.compared_codecs]
    sent = [as_sent(codec, wanted.wire.transport) for codec in (NO_COMPRESSION, wanted.compression, *asked)]
    compared = {label(codec): codec for codec in sent}
    schedule = options.schedule or wanted.pipeline.schedule
    try:
        SCHEDULES[schedule]
    except OptionsError as error:  # the recipe's own is checked, so it is that of the option
        raise OptionsError([text.replace("pipeline.schedule", "--schedule", 1) for text in error.mistakes]) from error
    given = None if options.forward_ms is None else (options.forward_ms / 1e3, options.backward_ms / 1e3)
    limits = limits_of(options.memory, pipeline.num_stages)
    codecs, prepared, cuts = list(compared.values()), prepare(wanted), None
    with threads(wanted.training.threads), showing("timing the layers and codecs") if not given else nullcontext():
        places = [] if given else places_of(prepared, options.measured)
        workload = workload_of(prepared, codecs, given, places)
    if mistakes := mistakes_of(workload, schedule):
        raise OptionsError(mistakes)
    if places:
        cuts = cuts_of(prepared, places, sent[1], min(options.bandwidth), limits)
    prepared.tell_notes()
    networks = [
        Network(bandwidth=bandwidth, latency=options.latency, duplex=options.duplex) for bandwidth in options.bandwidth
    ]
    most = options.max_in_flight
    return Answer(workload=workload, schedule=schedule, codecs=codecs, networks=networks, max_in_flight=most, cuts=cuts)


def make_parser() -> Parser:
    """The options of the command itself."""
    parser = Parser(
        prog=PROG,
        usage=f"{PROG} RECIPE [options] [--field value ...]",
        description="Predict the speed of a pipeline over slow links, and find the best cut: the cut whose slowest "
        "stage or link, at the lowest bandwidth, is fastest. Options can override fields of the recipe, as "
        "in thinwire train.",
    )
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="packaged name or path of a YAML file")
    for way in ("forward", "backward"):
        add(
            f"--{way}-ms",
            type=positive,
            help=f"milliseconds of one micro-batch {way} on one stage (default: measured on this machine)",
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
    add("--schedule", help="a schedule of thinwire train, or your own as module:name (default: the recipe's)")
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
        help="number of micro-batches that fit into a process's memory",
    )
    add(
        "--memory",
        type=float,
        nargs="+",
        metavar="GB",
        help="memory limit of a stage in the best cut: one number for all stages, or one for each",
    )
    add(
        "--measured",
        nargs="+",
        default=[],
        metavar="FILE",
        help="time no layers here: FILE is what `thinwire predict RECIPE --json` printed on the machine of a stage, "
        "one for each stage in their order",
    )
    add("--json", action="store_true", help="print JSON")
    return parser


@contextmanager
def _refusal() -> Iterator[None]:
    """Raise OptionsError as an error of argparse, which adds the name of the option."""
    try:
        yield
    except OptionsError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


@_refusal()
def _bandwidths(text: str) -> list[float]:
    """Bits a second."""
    rates = [parse_bandwidth(part) for part in text.split(",")]
    if 0 in rates:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text!r}")
    return [math.inf if rate is None else 1e6 * rate for rate in rates]


@_refusal()
def _latency(text: str) -> float:
    """Seconds."""
    return parse_latency(text) / 1e3
