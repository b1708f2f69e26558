"""`thinwire bench RECIPE`: the speed of each codec over slow links, beside plain torch and the LIMIT.

Each process has its own simulated host and, if there are enough, its own core. If there are fewer, each replica has
cores of its own. A contest is a measurement at one bandwidth, in which all contenders take turns. The first contest
uses unshaped links; then follows one contest for each bandwidth, in the order given.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from thinwire.launch.run import recipe
from thinwire.launch.run.recipe import Recipe
from thinwire.launch.shared.arguments import Parser
from thinwire.launch.shared.exit_codes import OK, working
from thinwire.launch.shared.links import BANDWIDTHS
from thinwire.launch.shared.strict_json import dumps
from thinwire.pipeline.errors import OptionsError

PROG = "thinwire bench"


def main(argv: Sequence[str]) -> int:
    """Measure a recipe, print tables or JSON, and return the exit status."""
    signal.signal(signal.SIGTERM, _leave)  # so that the hosts are removed
    options, rest = make_parser().parse_known_args(argv)
    wanted = recipe.parse(rest, prog=PROG)
    _check(wanted, options)
    options.codec = pairs_of(wanted, options.codec)
    from thinwire.launch.bench.links.contests import bench, ratios_of
    from thinwire.launch.bench.links.results import as_document
    from thinwire.launch.shared.environment import environment
    from thinwire.launch.shared.tables import Table, show

    options.ratios = ratios_of(options)
    options.bandwidth = options.bandwidth or BANDWIDTHS
    with working():
        contests, prepared = bench(wanted, rest, options)
    where = environment(shlex.join([*PROG.split(), *argv]))
    found = as_document(contests, prepared, options.ratios, where)
    if options.json:
        print(dumps(found, indent=2))
    else:
        show(map(Table.from_json, found["tables"]))
    return OK


def _check(wanted: Recipe, options: argparse.Namespace) -> None:
    """Raise OptionsError that names every option that does not fit a bench."""
    from thinwire.pipeline.devices.device import CPU, choose

    _check_replica_codecs(options.replica_codec)
    pipeline = wanted.pipeline
    several = {replica: each.pipeline.accumulation for replica, each in wanted.replicas.overrides.items()}
    several = {replica: passes for replica, passes in several.items() if passes not in (None, 1)}
    OptionsError.require(
        (pipeline.accumulation == 1, "a bench measures one pass in each step; set pipeline.accumulation to 1"),
        (
            not several,
            f"a bench measures one pass in each step; remove pipeline.accumulation from replicas.overrides, got "
            f"{', '.join(f'{passes} in replica {replica}' for replica, passes in several.items())}",
        ),
        (
            pipeline.num_processes * wanted.replicas.count > 1,
            "a bench needs links: pipeline.num_stages and replicas.count must give at least 2 processes, got 1",
        ),
        (
            wanted.wire.transport in ("gloo", "zmq") or choose(wanted.training.device) == CPU,
            f"a bench measures frames that cross its links; set wire.transport to gloo or zmq, got "
            f"{wanted.wire.transport}",
        ),
        (
            not wanted.training.compile,
            "a bench compares with plain torch, whose layers are not compiled; set training.compile to false",
        ),
        (
            wanted.replicas.count > 1 or not options.replica_codec,
            "--replica-codec needs replicas; add --replicas.count, such as 2",
        ),
        (
            wanted.num_boundaries > 0 or not (options.codec or options.like),
            "--codec and --like need a boundary; leave them out, or set pipeline.num_stages to 2 or more, got 1",
        ),
        (options.repetitions >= 1, f"--repetitions must be at least 1, got {options.repetitions}"),
        (options.steps >= 1, f"--steps must be at least 1, got {options.steps}"),
        (
            not options.compressed_only or _compresses(wanted, options),
            "--compressed-only needs a --codec or a --replica-codec that compresses",
        ),
    )


def _check_replica_codecs(listed: Sequence[str]) -> None:
    """Raise OptionsError, with a sentence, if one of --replica-codec is no codec of gradients between replicas."""
    from thinwire.pipeline.options import ReplicaOptions

    for text in listed:
        try:
            ReplicaOptions(count=2, gradients=text)
        except OptionsError as error:
            told = [mistake.partition(": ")[2] for mistake in error.mistakes]
            raise OptionsError([f"--replica-codec {text}: {mistake}" for mistake in told]) from error


def pairs_of(wanted: Recipe, given: Sequence[str] | None) -> Sequence[str]:
    """The codecs of boundaries that take turns, beside none. Without a boundary there are none."""
    if given or not wanted.num_boundaries:
        return given or ()
    compression = wanted.compression
    return (f"{compression.activations}/{compression.gradients}", *wanted.compared_codecs)


def _compresses(wanted: Recipe, options: argparse.Namespace) -> bool:
    """Whether a contender of Thinwire compresses something."""
    between = (str(wanted.replicas.method), *options.replica_codec)
    return not {*pairs_of(wanted, options.codec), *between} <= {"none", "none/none"}


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def make_parser() -> Parser:
    """The options of the command itself."""
    parser = Parser(
        prog=PROG,
        usage=f"{PROG} RECIPE [--bandwidth 1gbit,100mbit] [--codec q(4)/q(8) ...] [--json] [options of the recipe]",
        description="Measure the speed of a recipe over slow links between network namespaces. Every codec, no "
        "compression, and (of one pipeline) plain torch.distributed.pipelining take turns. The LIMIT stands beside "
        "them. Needs root.",
    )
    parser.add_argument("--bandwidth", help=f"bandwidths of the links, one contest each (default: {BANDWIDTHS})")
    parser.add_argument(
        "--codec", nargs="+", help="codecs as activations/gradients (default: those of the recipe, and some examples)"
    )
    parser.add_argument(
        "--replica-codec",
        nargs="+",
        action="extend",
        default=[],
        metavar="CODEC",
        help="codecs of the gradients between replicas, beside none and that of the recipe, such as 'ef(q(4))'",
    )
    parser.add_argument(
        "--repetitions", type=int, default=5, help="number of turns of each contender (default: %(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=2,
        help="measured steps in each turn, or rounds of replicas.sync.every steps (default: %(default)s)",
    )
    parser.add_argument(
        "--like",
        choices=["aqsgd"],
        help="use bandwidths that give the same ratios of wire to compute as Table 2 of 2206.01299; --bandwidth names "
        "some of that table's, such as 100mbit",
    )
    parser.add_argument(
        "--compressed-only",
        action="store_true",
        help="only codecs take turns on shaped links, which saves most of the time on slow ones",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
