"""`thinwire server RECIPE --listen ADDRESS:PORT`: the membership server of replicas that train on several hosts.

    thinwire keys run.keys
    thinwire server my.yaml --wire.keys run.keys --listen 10.0.0.1:29600
    thinwire train my.yaml --wire.keys run.keys --replicas.server 10.0.0.1:29600 --replicas.number 0

It keeps nothing. If it dies, start it again: the replicas wait for it, and go on from their checkpoints.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from ipaddress import ip_address
from pathlib import Path

from thinwire.launch.run import recipe
from thinwire.launch.run.recipe import Recipe
from thinwire.launch.shared.arguments import Parser
from thinwire.launch.shared.exit_codes import OK, FailedError, StoppedError
from thinwire.launch.shared.output import lasting
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.processes.addresses import is_address, parted

PROG = "thinwire server"
_BYTES_OF_A_PARAMETER = 16
"""What a message may carry: a replica gives weights and outer momentum, 8 bytes of each; twice that, to be sure."""
_BESIDES = 1 << 26
"""Bytes of a message that do not grow with the parameters, such as headers of frames."""
_UNKNOWN_MEMORY = 1 << 36
"""Bytes that stand for a machine's memory where the system does not say it."""
_SILENCES = 2
"""A replica is lost after so many times `wire.heartbeat`: its launcher connects again after one."""
_POLL = 0.05


@lasting()
def main(argv: Sequence[str]) -> int:
    """Serve until all replicas have ended, and return the exit status."""
    options, rest = make_parser().parse_known_args(argv)
    wanted = recipe.parse([options.recipe, *rest], PROG)
    _check(options.listen, wanted)
    _serve(options.listen, wanted, [options.recipe, *rest])
    return OK


def make_parser() -> Parser:
    """The options of the command itself."""
    parser = Parser(
        prog=PROG,
        usage=f"{PROG} RECIPE --listen ADDRESS:PORT [--option value ...]",
        description="Run the server through which replicas on several hosts exchange; nobody without the keys of "
        "wire.keys can send it anything. It listens on this one address only, and ends when all replicas have ended. "
        "The options of a recipe are those of thinwire train; give the same to all.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="packaged name or path of a YAML file")
    parser.add_argument(
        "--listen",
        required=True,
        metavar="ADDRESS:PORT",
        help="an address of this host, IPv6 in brackets, and a free port of it",
    )
    return parser


def _check(listen: str, wanted: Recipe) -> None:
    """Raise OptionsError if this is no place, or no run for one."""
    OptionsError.require(
        (_is_place(listen), f"--listen must be ADDRESS:PORT, such as 10.0.0.1:29600 or [fd00::1]:29600, got {listen}"),
        (
            not (_is_place(listen) and ip_address(parted(_with_port(listen))[0]).is_unspecified),
            "--listen must name one address of this host, because 0.0.0.0 and [::] stand for all of them",
        ),
        (
            wanted.replicas.elastic,
            "replicas.membership must be elastic, and replicas.count above 1: fixed replicas need no server",
        ),
        (
            wanted.wire.keys is not None,
            f"{PROG} needs keys, so that nobody else can take part: thinwire keys FILE makes them, and --wire.keys "
            "names the file, here and on all hosts",
        ),
    )
    from thinwire.pipeline.wire.backends import check_installed

    check_installed()


def _is_place(text: str) -> bool:
    """Whether a text is ADDRESS:PORT; the port * is any free one.

    ZeroMQ would take 0.0.0.00 for all addresses, and 99999 for another port.
    """
    with suppress(ValueError):
        return is_address(parted(_with_port(text))[0])
    return False


def _with_port(listen: str) -> str:
    """The same with a number for the port."""
    return f"{listen[:-1]}1" if listen.endswith(":*") else listen


def _serve(listen: str, wanted: Recipe, arguments: Sequence[str]) -> None:
    import time

    import zmq

    from thinwire.launch.hosts.commands import gathered_signals
    from thinwire.launch.run.elastic.agent import report
    from thinwire.launch.run.wire import agreed_by_hosts
    from thinwire.launch.shared.control_groups import allow_many_files
    from thinwire.pipeline.processes.zeromq.keys import Keys
    from thinwire.pipeline.replicas.membership.listening import listen as begin
    from thinwire.pipeline.replicas.membership.server import Size

    assert wanted.wire.keys is not None, "it was checked"
    keys, wire = Keys.read(Path(wanted.wire.keys)), wanted.wire
    size = Size(wanted.replicas.count, wanted.group_processes, wire.timeout, _SILENCES * wire.heartbeat)
    address, port = parted(_with_port(listen))[0], "*" if listen.endswith(":*") else parted(listen)[1]
    allow_many_files()  # strangers may hold many connections
    try:
        server, mesh = begin(address, port, keys, size, agreed_by_hosts(wanted), _largest(wanted), report)
    except zmq.ZMQError as error:
        raise OptionsError(f"--listen must be a free ADDRESS:PORT of this host, got {listen}: {error}") from error
    with closing(mesh), gathered_signals() as came:
        _show_commands(mesh.place, wanted, arguments)
        while not (came or server.is_over or mesh.broken):
            time.sleep(_POLL)
        ended = server.ended()
        if mesh.broken is not None:
            raise FailedError(mesh.broken)
        if came and not server.is_over:
            raise StoppedError(
                f"the membership server was stopped by {came[0].name}; replicas that are in the run wait for it up to "
                f"{wire.timeout:g} s (wire.timeout), and go on from their checkpoints if the same command starts it "
                f"again",
                came[0],
            )
    if ended is None:
        raise FailedError("no replica has reached the end of the run; their hosts say why")
    report(ended)


def _largest(wanted: Recipe) -> int:
    """The most bytes that a message may carry; without a bound, one could make this process gather memory for ever."""
    from thinwire.launch.shared.control_groups import machine_memory
    from thinwire.models.model import count_parameters

    parameters = count_parameters(wanted.model)
    if parameters is None:
        return machine_memory() or _UNKNOWN_MEMORY
    return _BYTES_OF_A_PARAMETER * parameters + _BESIDES


def _show_commands(address: str, wanted: Recipe, arguments: Sequence[str]) -> None:
    """Print what to type on the hosts of the replicas."""
    import shlex

    print(f"the membership server listens at {address}; type on the host of each, with the same file of keys there:")
    common = shlex.join(["thinwire", "train", *arguments, "--replicas.server", address])
    for replica in range(wanted.replicas.count):
        print(f"  {common} --replicas.number {replica}")
    sys.stdout.flush()
