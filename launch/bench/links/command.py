"""`thinwire bench RECIPE`: the speed of each codec over slow links, beside plain torch and the LIMIT.

Each process has its own simulated host and, if there are enough, its own core. A contest is a measurement at one
bandwidth, in which all contenders take turns. The first contest uses unshaped links; then follows one contest for each
bandwidth, in the order given.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch.distributed as dist
from rich.console import Console

from thinwire.launch.bench.links.contenders import BASELINES, Codecs
from thinwire.launch.bench.links.results import REFERENCE, Contest, as_document
from thinwire.launch.bench.links.worker import BenchPlan, measured, shaped
from thinwire.launch.hosts.namespaces import Cluster, ClusterError, Host, missing
from thinwire.launch.hosts.network import INTERFACE
from thinwire.launch.run import recipe
from thinwire.launch.run.assembly import Prepared, prepare
from thinwire.launch.run.recipe import Recipe
from thinwire.launch.shared import scratch
from thinwire.launch.shared.arguments import Parser
from thinwire.launch.shared.environment import environment
from thinwire.launch.shared.exit_codes import OK, FailedError, working
from thinwire.launch.shared.links import Links, parse_bandwidth
from thinwire.launch.shared.tables import Table, show, text_of
from thinwire.launch.timing.published import RATIOS
from thinwire.launch.timing.workload import codec_pair, label
from thinwire.pipeline.errors import OptionsError

PROG = "thinwire bench"
DEFAULT_CODECS = ("q(4)/q(8)", "q(3)/q(6)", "q(2)/q(4)")
DEFAULT_BANDWIDTHS = "10gbit,1gbit,500mbit,300mbit,100mbit"
_POLL_SECONDS = 0.05


def main(argv: Sequence[str]) -> int:
    """Measure a recipe, print tables or JSON, and return the exit status."""
    signal.signal(signal.SIGTERM, _leave)  # so that the hosts are removed
    options, rest = make_parser().parse_known_args(argv)
    with working():
        contests, prepared = bench(rest, options)
    where = environment(shlex.join([*PROG.split(), *argv]))
    found = as_document(contests, prepared, RATIOS if options.like else {}, where)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        show(map(Table.from_json, found["tables"]))
    return OK


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


class BenchError(FailedError):
    """A process of the bench ended before its work was done."""


def bench(arguments: Sequence[str], options: argparse.Namespace) -> tuple[list[Contest], Prepared]:
    """Run all contenders at all bandwidths, and return the measurements and the prepared recipe. Needs root."""
    contenders, bandwidths = _contenders(options.codec), _bandwidths(options.bandwidth or DEFAULT_BANDWIDTHS)
    wanted = recipe.parse(arguments, prog=PROG)
    _check(wanted, options)
    processes = wanted.pipeline.num_processes
    shapes = [_links(processes, rate) for rate in (None, *bandwidths)]
    if reason := missing(shapes[-1]):
        raise ClusterError(reason)
    prepared = prepare(wanted)
    aside, contests = Console(stderr=True), list[Contest]()
    with scratch.folder() as folder:
        plan = BenchPlan(
            arguments=list(arguments),
            contenders=contenders,
            contests=1 + (len(RATIOS) if options.like else len(bandwidths)),
            repetitions=options.repetitions,
            steps=options.steps,
            store=str(folder / "store"),
            folder=str(folder),
        )
        plan.write(folder / "plan.json")
        aside.print(
            f"{plan.repetitions} turns for each of {', '.join(contenders)}, on {processes} hosts", highlight=False
        )
        cluster = Cluster(Links(num_hosts=processes))
        with cluster as hosts, _Crew(plan, hosts) as crew:
            for index in range(plan.contests):
                if options.like and index == 1:
                    bandwidths = _like_aqsgd(contests[0])
                rate = bandwidths[index - 1] if index else None
                links = "unshaped links" if rate is None else f"links of {text_of(rate)} Mbit/s"
                aside.print(f"{index + 1} of {plan.contests}: {links}", highlight=False)
                cluster.reshape(_links(processes, rate))
                crew.measure(index)
                contests.append(Contest.read(Path(folder), index, processes, rate))
    return contests, prepared


def _check(wanted: Recipe, options: argparse.Namespace) -> None:
    """Raise OptionsError that names every option that does not fit a bench."""
    pipeline = wanted.pipeline
    OptionsError.require(
        (pipeline.accumulation == 1, "a bench measures one pass in each step; set pipeline.accumulation to 1"),
        (
            pipeline.num_processes > 1,
            "a bench needs links: pipeline.num_stages must give at least 2 processes, got 1",
        ),
        (options.repetitions >= 1, f"--repetitions must be at least 1, got {options.repetitions}"),
        (
            options.like is None or options.bandwidth is None,
            f"--like {options.like} sets its own bandwidths; remove --bandwidth",
        ),
        (options.steps >= 1, f"--steps must be at least 1, got {options.steps}"),
    )


def _contenders(pairs: Sequence[str]) -> dict[str, Codecs | None]:
    """The contenders by name: uncompressed, the pairs of codecs, and plain torch (None)."""
    wanted = {label(pair): pair for pair in map(codec_pair, (REFERENCE, *pairs))}
    ours = {name: Codecs(pair.activations, pair.gradients) for name, pair in wanted.items()}
    return {**ours, **dict.fromkeys(BASELINES)}


def _bandwidths(listed: str) -> list[float]:
    """The bandwidths of "1gbit,100mbit" in Mbit/s, without none: unshaped links are always measured first."""
    rates = [parse_bandwidth(text) for text in listed.split(",")]
    return [rate for rate in rates if rate is not None]


def _links(processes: int, bandwidth: float | None) -> Links:
    """Links with a bandwidth for every two neighbours, so that the two links of a stage do not share one bandwidth."""
    pairs = [pair for low in range(processes - 1) for pair in ((low, low + 1), (low + 1, low))]
    return Links(num_hosts=processes, overrides={} if bandwidth is None else dict.fromkeys(pairs, bandwidth))


class _Crew:
    """The processes of a bench: one on every host, each on its own core if there are enough cores."""

    def __init__(self, plan: BenchPlan, hosts: Sequence[Host]) -> None:
        self._plan, self._hosts = plan, hosts
        self._store = dist.FileStore(plan.store, -1)
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> _Crew:
        cores = sorted(os.sched_getaffinity(0))
        for rank, host in enumerate(self._hosts):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": str(len(self._hosts)),
                "MASTER_ADDR": self._hosts[0].address,
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "OMP_NUM_THREADS": "1",
            }
            command = [
                sys.executable,
                "-m",
                "thinwire.launch.bench.links.worker",
                str(Path(self._plan.folder, "plan.json")),
            ]
            pinned = ["taskset", "-c", str(cores[rank % len(cores)]), *command]
            output = Path(self._plan.folder, f"output-{rank}").open("wb")
            with output:
                self._processes.append(
                    subprocess.Popen(
                        host.command(pinned),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **environment},
                    )
                )
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def measure(self, index: int) -> None:
        """Measure one contest, on links that have its bandwidth. BenchError if a process ends before."""
        self._store.set(shaped(index), "")
        keys = [measured(index, rank) for rank in range(len(self._hosts))]
        while not self._store.check(keys):
            for rank, process in enumerate(self._processes):
                if process.poll():
                    said = Path(self._plan.folder, f"output-{rank}").read_text(errors="replace")
                    raise BenchError(f"process {rank} of the bench ended with {process.returncode}:\n{said}")
            time.sleep(_POLL_SECONDS)


def _like_aqsgd(unshaped: Contest) -> list[float]:
    """The bandwidths in Mbit/s that give the ratios of Table 2: wire time of an activation over its forward compute."""
    compute, frames = unshaped.compute(), unshaped.frames(REFERENCE)
    forward = max(seconds for (_, task), seconds in compute.items() if task == "forward")
    count, nbytes = frames[0, "activations"]
    return [8e-6 * nbytes / count / (ratio * forward) for ratio in RATIOS.values()]


def make_parser() -> Parser:
    """The options of the command itself."""
    parser = Parser(
        prog=PROG,
        usage=f"{PROG} RECIPE [--bandwidth 1gbit,100mbit] [--codec q(4)/q(8) ...] [--json] [options of the recipe]",
        description="Measure the speed of a recipe over slow links between network namespaces. Every codec, no "
        "compression, and plain torch.distributed.pipelining take turns. The LIMIT stands beside them. Needs root.",
        allow_abbrev=False,
        takes_recipe=True,
    )
    parser.add_argument(
        "--bandwidth", help=f"bandwidths of the links, one contest each (default: {DEFAULT_BANDWIDTHS})"
    )
    parser.add_argument(
        "--codec",
        nargs="+",
        default=list(DEFAULT_CODECS),
        help="codecs as activations/gradients (default: %(default)s)",
    )
    parser.add_argument(
        "--repetitions", type=int, default=5, help="number of turns of each contender (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=2, help="measured steps in each turn (default: %(default)s)")
    parser.add_argument(
        "--like",
        choices=["aqsgd"],
        help="use bandwidths that give the same ratios of wire to compute as Table 2 of 2206.01299",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
