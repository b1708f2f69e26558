"""`thinwire cluster`: several simulated hosts on this machine, slow links between them, and a command on each.

    thinwire cluster run --hosts 4 --bandwidth 100mbit -- thinwire train quickstart
    thinwire cluster run --hosts 3 --bandwidth 1gbit --link 1-2:20mbit -- sh my-own-script.sh
    thinwire cluster clean

`thinwire train` becomes a torchrun node on each host. Each line of output begins with the name of its host. At the end,
the network is removed.
"""

from __future__ import annotations

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from thinwire.errors import attempt
from thinwire.errors.names import did_you_mean
from thinwire.launch.hosts import commands, shaping
from thinwire.launch.hosts.namespaces import Cluster, ClusterError, missing, remove_orphans
from thinwire.launch.recipe import recipe
from thinwire.launch.recipe.recipe import Recipe
from thinwire.launch.shared import scratch, variables
from thinwire.launch.shared.arguments import Parser
from thinwire.launch.shared.links import Links, parse_bandwidth, parse_latency, parse_loss, parse_overrides
from thinwire.pipeline.errors import OptionsError

if TYPE_CHECKING:
    from thinwire.pipeline.processes.placement import Placement

PROG = "thinwire cluster"
MASTER_PORT = 29500
GRACE = 10.0
"""Seconds for the other hosts to end after one host has failed."""


@dataclass(frozen=True, kw_only=True)
class HostCommands:
    """What each host runs."""

    commands: Sequence[Sequence[str]]
    """The command of each host."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the environment of every host."""
    where: Placement | None = None
    """The process of each stage, if the command trains."""


def main(argv: Sequence[str]) -> int:
    """Run a command on a cluster, or clean up after killed clusters, and return the exit status."""
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print(make_parser().format_help(), end="")
        return 0
    if name not in ACTIONS:
        raise OptionsError(f"{PROG} has no {name!r}{did_you_mean(name, ACTIONS)}; known: {', '.join(ACTIONS)}")
    return ACTIONS[name][1](argv[1:])


def run(argv: Sequence[str]) -> int:
    """Make the hosts, run the command on each, and remove the hosts.

    The exit status is that of the first command that failed, or 0.
    """
    given, command = _split(argv)
    _, rest = _run_parser().parse_known_args(given)
    if rest and not command and not rest[0].startswith("-"):
        raise OptionsError(f"give -- before the command of the hosts: {PROG} run ... -- {shlex.join(rest)}")
    options = _run_parser().parse_args(given)
    links = _links(options)
    if reason := missing(links):
        raise ClusterError(reason)
    job = plan(command, links.num_hosts)
    from thinwire.launch.processes import failures

    with commands.gathered_signals() as came, scratch.folder() as folder:
        # only a training leaves reports, and torchrun leaves folders of logs in TMPDIR
        leaving = {variables.FAILURES: str(folder), "TMPDIR": str(folder)} if job.where is not None else {}
        with Cluster(links) as hosts:
            members = [
                commands.HostCommand(
                    f"host {host.index}",
                    host.command(job.commands[host.index]),
                    {**environment(host.index, len(hosts)), **job.environment, **leaving},
                    hushed=job.where is not None,  # the reports below have its failures
                )
                for host in hosts
            ]
            outcome = commands.supervise(members, came, GRACE)
        for member in members:
            member.finish()
        reports = failures.read_reports(folder)
    told = outcome.told
    if outcome.status and reports and job.where is not None and not came:
        # a host only says that one of its processes failed; the process without a report is the one
        processes = job.where.num_replicas * job.where.num_processes
        silent = dict.fromkeys(rank for rank in range(processes) if rank not in reports)
        told = failures.explain(reports, silent, job.where)
    if told:
        print(told, file=sys.stderr)
    return outcome.status


def clean(argv: Sequence[str]) -> int:
    """Remove the hosts and folders of killed clusters, and return the exit status."""
    _clean_parser().parse_args(argv)
    if reason := missing(Links()):
        raise ClusterError(reason)
    removed = remove_orphans() + scratch.remove_orphans()
    print("\n".join(f"removed {name}" for name in sorted(removed)) or "nothing to remove")
    return 0


ACTIONS: Mapping[str, tuple[str, Callable[[Sequence[str]], int]]] = MappingProxyType(
    {
        "run": ("run a command on several hosts on this machine, with slow links between them", run),
        "clean": ("remove the hosts, processes and temporary folders of killed runs", clean),
    }
)
"""Every action by name: its purpose and its function."""


def plan(command: Sequence[str], num_hosts: int) -> HostCommands:
    """The job of each host: a torchrun node if the command is `thinwire train`, else the command itself.

    Raises:
        OptionsError, ModelError: there is no command, its recipe is wrong, or its processes cannot be divided evenly
            among the hosts.
    """
    if not command:
        raise OptionsError(f"{PROG} run needs a command after --, as in {PROG} run -- thinwire train RECIPE")
    if Path(command[0]).name != "thinwire" or len(command) < 2 or command[1] not in ("train", "simulate"):
        return HostCommands(commands=[list(command)] * num_hosts)
    if command[1] == "simulate":
        raise OptionsError("thinwire simulate is one process and sends nothing to other hosts; run thinwire train")
    wanted = recipe.parse(command[2:])
    from thinwire.launch.plan.prepare import prepare

    prepare(wanted)  # finds mistakes once for all hosts, and reads the data while there is a network
    return training(wanted, command[2:], num_hosts)


def training(wanted: Recipe, arguments: Sequence[str], num_hosts: int) -> HostCommands:
    """A torchrun node for each host, with an equal part of the processes of the recipe."""
    from thinwire.launch.plan.places import real_placement

    processes = wanted.num_processes
    each, left = divmod(processes, num_hosts)
    if left:
        advice = "change --hosts or pipeline.num_stages" + ", or replicas.count" * (wanted.replicas.count > 1)
        raise OptionsError(f"hosts must divide the recipe's {processes} processes, got {num_hosts}; {advice}")
    rendezvous = ["--master-addr", shaping.address(0), "--master-port", str(MASTER_PORT)]
    restarts = ["--max-restarts", str(wanted.checkpoint.restarts)] if wanted.checkpoint.restarts else []
    commands = [
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(num_hosts), "--node-rank", str(host), "--nproc-per-node", str(each)),
            *rendezvous,
            *restarts,
            *("-m", "thinwire.launch.train", *arguments),
        ]
        for host in range(num_hosts)
    ]
    # Without these, torch warns that addresses have no names, and a node prints a traceback if the first node leaves
    # early. The messages of a stage about a failure do not depend on them.
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "LOGLEVEL": "CRITICAL"}
    settings = {"OMP_NUM_THREADS": str(wanted.training.threads), **{k: os.environ.get(k, v) for k, v in quiet.items()}}
    return HostCommands(commands=commands, environment=settings, where=real_placement(wanted))


def environment(host: int, num_hosts: int) -> dict[str, str]:
    """The environment of a command on a host."""
    place = {"NODE_RANK": str(host), "MASTER_ADDR": shaping.address(0), "MASTER_PORT": str(MASTER_PORT)}
    return {
        "THINWIRE_HOST": str(host),
        "THINWIRE_HOSTS": str(num_hosts),
        **place,
        # torchrun takes from here the options that its command line does not give
        "PET_NNODES": str(num_hosts),
        **{f"PET_{name}": value for name, value in place.items()},
        "GLOO_SOCKET_IFNAME": shaping.INTERFACE,
        "PYTHONUNBUFFERED": "1",
    }


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options, and the command after the first `--`."""
    place = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:place]), list(argv[place + 1 :])


def make_parser() -> Parser:
    """The actions of the command with their options."""
    parser = Parser(
        prog=PROG,
        description="Simulate several hosts with slow links on this machine.",
        epilog=f"{PROG} run --help explains its options.",
    )
    actions = parser.add_subparsers(metavar="ACTION")
    for name, made in (("run", _run_parser()), ("clean", _clean_parser())):
        actions.add_parser(name, help=ACTIONS[name][0], parents=[made], add_help=False)
    return parser


def _clean_parser() -> Parser:
    return Parser(prog=f"{PROG} clean", description=ACTIONS["clean"][0])


def _run_parser() -> Parser:
    parser = Parser(
        prog=f"{PROG} run",
        usage=f"{PROG} run [--option value ...] -- COMMAND ...",
        description="Run COMMAND on every host. `thinwire train RECIPE ...` becomes one training over all hosts, each "
        "with an equal part of its processes. Any other command runs as it is, with THINWIRE_HOST, THINWIRE_HOSTS, "
        "NODE_RANK, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME in its environment. torchrun takes its nodes, rank "
        "and address from there, so `torchrun --nproc-per-node 1 script.py` is one group over all hosts.",
    )
    add = parser.add_argument
    add("--hosts", type=int, default=2, help="number of hosts; each has its own address (default: %(default)s)")
    add(
        "--bandwidth",
        default="none",
        help="bandwidth of each host in each direction: 500kbit, 100mbit, 10gbit, or none (default: %(default)s)",
    )
    add(
        "--latency",
        default="0ms",
        help="latency from host to host in each direction: 500us, 20ms (default: %(default)s)",
    )
    add("--loss", default="0%", help="share of packets that are lost: 0.1%%, 1%% (default: %(default)s)")
    add(
        "--link",
        action="append",
        default=[],
        help="a bandwidth between two hosts instead of --bandwidth: 1-2:20mbit, or '1>2:20mbit' for one direction; "
        "hosts are counted from 0; repeat the option for more links",
    )
    return parser


def _links(options: Namespace) -> Links:
    """The network from the options. OptionsError names all mistakes."""
    bandwidth, latency, loss, overrides = attempt(
        lambda: parse_bandwidth(options.bandwidth),
        lambda: parse_latency(options.latency),
        lambda: parse_loss(options.loss),
        lambda: parse_overrides(options.link),
    )
    return Links(num_hosts=options.hosts, bandwidth=bandwidth, latency=latency, loss=loss, overrides=overrides)
