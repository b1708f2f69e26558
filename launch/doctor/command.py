"""`thinwire doctor`: check this machine.

Training needs little. Several hosts need an interface that the others can reach, and containers need Docker. If one of
these is missing, the errors come late and are hard to read. A probe that fails or hangs becomes a row of the table, and
does not stop the other probes.

`thinwire doctor RECIPE` says what would carry the frames of each pair of processes of a recipe, and why. With
`--peers` it says which machines reach which (peers.py).
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from thinwire.errors.words import listed
from thinwire.launch.shared import probes
from thinwire.launch.shared.arguments import Parser, positive
from thinwire.launch.shared.exit_codes import FAILED, MISTAKE, OK
from thinwire.launch.shared.probes import Finding
from thinwire.launch.shared.strict_json import dumps
from thinwire.launch.shared.tables import Table, Value, document, say, show
from thinwire.pipeline.errors import OptionsError

if TYPE_CHECKING:
    from thinwire.launch.doctor.peers import Peer, Way
    from thinwire.launch.recipe.recipe import Recipe

PROG = "thinwire doctor"
PROBE_SECONDS = 60.0

PROBES: dict[str, tuple[str, Callable[[], Finding]]] = {
    "Python": ("everything", probes.probe_python),
    "torch": ("everything", probes.probe_torch),
    "gloo": ("stages in processes", probes.probe_gloo),
    "NCCL": ("boundaries from GPU to GPU", probes.probe_nccl),
    "GPUs": ("stages on GPUs", probes.probe_gpus),
    "transport": ("wire.transport auto, for each pair of processes", probes.probe_transport),
    "CPU cores": ("stages at the same time", probes.probe_cores),
    "memory": ("stages on this host", probes.probe_memory),
    "disk": ("checkpoints, AQ-SGD's store", probes.probe_disk),
    "open files": ("many stages in a process", probes.probe_open_files),
    "Docker": ("stages in containers", probes.probe_docker),
    "interface": ("several hosts: each must reach the others at this address, over gloo", probes.probe_interface),
}
"""By the name of a part: what needs it, and its probe."""


def bounded(probe: Callable[[], Finding], seconds: float = PROBE_SECONDS) -> Finding:
    """Run a probe with a time limit. A probe that raises or takes too long gives a finding that says so."""
    findings: list[Finding] = []

    def work() -> None:
        try:
            findings.append(probe())
        except Exception as error:
            findings.append(Finding(f"{type(error).__name__}: {error}", "missing", "fix what the error names"))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return findings[0] if findings else Finding(f"no answer within {seconds:g} s", "missing", "check it by hand")


def examine() -> dict[str, Finding]:
    """What every probe found, by the name of its part, in the order of the table."""
    return {name: bounded(probe) for name, (_, probe) in PROBES.items()}


def table(found: Mapping[str, Finding]) -> Table:
    """The findings as a table for people."""
    columns = ("part", "found", "needed for", "verdict", "what to do")
    rows = [(name, one.found, PROBES[name][0], one.verdict, one.advice) for name, one in found.items()]
    return Table("what this machine can do", columns, rows, "A missing part matters only if you use what needs it.")


def main(argv: Sequence[str]) -> int:
    """Print the findings, as a table or as JSON, and return the exit status.

    It is 1 if torch is missing or its version is not supported, else 0.
    """
    options, rest = make_parser().parse_known_args(argv)
    if options.peers:
        return show_peers(rest, options)
    if rest or options.gpus:
        return show_pairs(rest, options)
    found = examine()
    if options.json:
        rows = [{"name": name, **one._asdict(), "needed_for": PROBES[name][0]} for name, one in found.items()]
        print(dumps(rows, indent=2))
    else:
        show([table(found)])
    return FAILED if found["torch"].verdict == "missing" else OK


def show_pairs(argv: Sequence[str], options: argparse.Namespace) -> int:
    """Print what carries the frames of each pair of processes of a recipe, and return the exit status.

    It is 2 if a pair has no transport, as for the run itself.
    """
    from thinwire.launch.recipe import recipe

    wanted = recipe.parse(argv, prog=PROG)
    from thinwire.pipeline.devices.device import num_gpus

    pairs, refused = pairs_table(wanted, options.gpus or [num_gpus()])
    if options.json:
        print(dumps(document(f"transports of {wanted.name}", [pairs]), indent=2))
    else:
        show([pairs])
    return MISTAKE if refused else OK


def pairs_table(wanted: Recipe, gpus: Sequence[int]) -> tuple[Table, bool]:
    """What carries the frames of each pair, and whether any pair has nothing; `gpus` are those of each host.

    Raises:
        OptionsError: the processes cannot be placed on these hosts.
    """
    from thinwire.launch.plan.places import real_placement
    from thinwire.pipeline.devices.transports import carrying, placed
    from thinwire.pipeline.processes.backends import TRANSPORTS

    size = wanted.pipeline.num_processes
    found = placed(wanted.num_processes, gpus, wanted.training.device)
    where = [real_placement(wanted, rank) for rank in range(0, wanted.num_processes, size)]
    neighbours = [pair for each in where for pair in sorted(each.neighbours)]
    rows: list[list[Value]] = []
    refused, by = False, ""
    for low, high in neighbours:
        by = "refused"
        try:
            by, why = carrying(wanted.wire.transport, (low, high), found)
        except OptionsError as error:
            why, refused = str(error), True
        rows.append([low, found[low].words, high, found[high].words, by, why])
    by = TRANSPORTS[wanted.wire.transport].backend
    for low, high in sorted(where[0].counterparts):
        rows.append([low, found[low].words, high, found[high].words, by, "replicas exchange from the host's memory"])
    columns = ["process", "computes on", "and process", "computes on", "frames over", "why"]
    hosts = f"{len(gpus)} host{'s' * (len(gpus) > 1)} with {listed([*map(str, gpus)])} GPUs"
    note = f"{wanted.num_processes} processes on {hosts}"
    return Table(f"what carries frames with wire.transport {wanted.wire.transport}", columns, rows, note), refused


def show_peers(argv: Sequence[str], options: argparse.Namespace) -> int:
    """Print which machines reach which, and the words that start a run here; return the exit status.

    It is 1 if a machine does not reach another one.
    """
    from thinwire.launch.doctor.peers import Meeting, own_place, resolved
    from thinwire.launch.recipe import recipe

    if argv:
        recipe.parse(argv, prog=PROG)  # a mistake is told before the others are asked
    peers = resolved(options.peers)
    index, interface, listener = own_place(peers)
    meeting = Meeting(peers, index, interface, listener)
    if not options.json:
        say(f"this is {peers[index].place}, on {interface}; the same command must run on every machine now")
    ways, notes = meeting.meet(options.wait, argv)
    found = ways_table(peers, ways)
    start = (
        f"a run starts here with GLOO_SOCKET_IFNAME={interface} torchrun --nnodes {len(peers)} --node-rank {index} "
        f"--master-addr {peers[0].address} --master-port {peers[0].port} ..."
    )
    if options.json:
        print(dumps(document("peers", [found], interface=interface, notes=notes), indent=2))
    else:
        show([found])
        say(*notes, start)
    return FAILED if any(way.fault for way in ways.values()) else OK


def ways_table(peers: Sequence[Peer], ways: Mapping[tuple[int, int], Way]) -> Table:
    """The ways as a table for people."""
    rows: list[list[Value]] = []
    for (one, other), way in sorted(ways.items()):
        latency, rate = (
            None if value is None else scale * value for value, scale in ((way.latency, 1e3), (way.rate, 1e-6))
        )
        rows.append([peers[one].place, peers[other].place, way.over, latency, rate, way.fault or "reached"])
    columns = ("from", "to", "over", "latency ms", "Mbit/s", "found")
    return Table(
        "which machine reaches which", columns, rows, "latency: one way. Mbit/s: goodput of one connection, alone."
    )


def make_parser() -> Parser:
    """The options of the command itself."""
    parser = Parser(
        prog=PROG,
        usage=f"{PROG} [--json]\n       {PROG} RECIPE [--gpus N ...] [--json] [options of the recipe]\n"
        f"       {PROG} [RECIPE] --peers HOST:PORT HOST:PORT ... [--wait SECONDS] [--json]",
        description="Check what this machine can do for Thinwire. With a recipe: say what would carry the frames of "
        "each pair of its processes (wire.transport), and why. With --peers, on every machine at the same time: say "
        "which machines reach which, how fast, and what a recipe would cost there.",
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--gpus",
        type=int,
        nargs="+",
        metavar="N",
        help="the GPUs of each host, such as 4 4 for two hosts with four each (default: one host, with this machine's "
        "GPUs); processes are divided evenly",
    )
    either.add_argument(
        "--peers",
        nargs="+",
        metavar="HOST:PORT",
        help="all machines of a run, this one too, the same list on each; the first is torchrun's --master-addr and "
        "--master-port",
    )
    parser.add_argument(
        "--wait",
        type=positive,
        default=120.0,
        metavar="SECONDS",
        help="how long machines wait for the others (default: 120)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
