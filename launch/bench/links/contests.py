"""The contests of a link bench: the contenders' processes, and the links that they take turns on."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from rich.status import Status

from thinwire.launch.bench.links.contenders import BASELINES, Codecs
from thinwire.launch.bench.links.results import BETWEEN, RATIOS, REFERENCE, Contest
from thinwire.launch.bench.links.worker import TURNS, BenchPlan, linked, measured, shaped
from thinwire.launch.hosts.namespaces import Cluster, ClusterError, Host, missing
from thinwire.launch.hosts.shaping import INTERFACE
from thinwire.launch.plan.prepare import prepare
from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.run.recipe import Recipe
from thinwire.launch.shared import scratch
from thinwire.launch.shared.exit_codes import FailedError, ended
from thinwire.launch.shared.links import Links, parse_bandwidth
from thinwire.launch.shared.tables import duration_text, text_of
from thinwire.launch.timing.workload import codec_pair, label
from thinwire.pipeline.errors import OptionsError

_POLL_SECONDS = 0.05
_PRINT_SECONDS = 60.0
"""How often a line of progress is printed where no terminal shows it."""


def bench(wanted: Recipe, arguments: Sequence[str], options: argparse.Namespace) -> tuple[list[Contest], Prepared]:
    """Run all contenders at all bandwidths, and return the measurements and the prepared recipe. Needs root.

    `arguments` are the words of the command line that give the recipe; `options` have `ratios`, found by `ratios_of`.
    """
    contenders, bandwidths = _contenders(options, wanted), _bandwidths(options.bandwidth)
    processes = wanted.num_processes
    shapes = [_links(wanted, rate) for rate in (None, *bandwidths)]
    if reason := missing(shapes[-1]):
        raise ClusterError(reason)
    prepared = prepare(wanted)
    aside, contests = Console(stderr=True), list[Contest]()
    with scratch.folder() as folder:
        plan = BenchPlan(
            arguments=list(arguments),
            contenders=contenders,
            shaped=[name for name in contenders if not options.compressed_only or name not in (REFERENCE, *BASELINES)],
            contests=1 + len(options.ratios or bandwidths),
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
        with cluster as hosts, _Workers(plan, hosts, wanted.pipeline.num_processes) as workers:
            for index in range(plan.contests):
                if options.ratios and index == 1:
                    bandwidths = _like_aqsgd(contests[0], options.ratios)
                rate = bandwidths[index - 1] if index else None
                links = "unshaped links" if rate is None else f"links of {text_of(rate)} Mbit/s"
                aside.print(f"{index + 1} of {plan.contests}: {links}", highlight=False)
                cluster.reshape(_links(wanted, rate))
                with aside.status(links) as view:
                    workers.measure(index, view, aside)
                contests.append(Contest.read(Path(folder), index, processes, rate, wanted.pipeline.num_processes))
    return contests, prepared


def ratios_of(options: argparse.Namespace) -> dict[float, float]:
    """The rows of Table 2 whose ratios the links get, by bandwidth in bits a second; empty without --like."""
    if not options.like:
        return {}
    wanted = [round(1e6 * rate) for rate in _bandwidths(options.bandwidth)] if options.bandwidth else list(RATIOS)
    known = ", ".join(f"{bandwidth / 1e6:g}mbit" for bandwidth in RATIOS)
    OptionsError.require(
        (
            bool(wanted) and set(wanted) <= set(RATIOS),
            f"--bandwidth with --like {options.like} must name bandwidths of its table, got {options.bandwidth}; "
            f"known: {known}",
        )
    )
    return {bandwidth: RATIOS[bandwidth] for bandwidth in wanted}


def _contenders(options: argparse.Namespace, wanted: Recipe) -> dict[str, Codecs | None]:
    """The contenders by name: uncompressed, the pairs of codecs, and plain torch (None).

    With replicas, each pair is there without compression between replicas, with that of the recipe, and with each
    --replica-codec. Plain torch has no replicas here.
    """
    ends = {label(pair): pair for pair in (codec_pair(text) for text in (REFERENCE, *options.codec))}
    if wanted.replicas.count == 1:
        ours = {name: Codecs(pair.activations, pair.gradients) for name, pair in ends.items()}
        return {**ours, **dict.fromkeys(BASELINES)}
    return {
        name if between == REFERENCE else f"{name}{BETWEEN}{between}": Codecs(pair.activations, pair.gradients, between)
        for between in dict.fromkeys((REFERENCE, str(wanted.replicas.method), *options.replica_codec))
        for name, pair in ends.items()
    }


def _bandwidths(listed: str) -> list[float]:
    """The bandwidths of "1gbit,100mbit" in Mbit/s, each once, without none: unshaped links are measured anyway."""
    rates = dict.fromkeys(parse_bandwidth(text) for text in listed.split(","))
    return [rate for rate in rates if rate is not None]


def _links(wanted: Recipe, bandwidth: float | None) -> Links:
    """Links with a bandwidth for every two that are linked: the links of a process do not share one bandwidth."""
    pairs = [pair for low, high in linked(wanted) for pair in ((low, high), (high, low))]
    overrides = {} if bandwidth is None else dict.fromkeys(pairs, bandwidth)
    return Links(num_hosts=wanted.num_processes, overrides=overrides)


def core_of(processes: int, size: int, cores: int) -> list[int]:
    """Which of so many cores each process has, in pipelines of `size` processes.

    Each replica has cores of its own if there are enough: all replicas compute at the same time, and of the stages of
    one replica some always wait.
    """
    each = max(1, cores // (processes // size))
    return [(rank // size * each + rank % size % each) % cores for rank in range(processes)]


class _Workers:
    """The processes of a bench: one on every host, each on its own core if there are enough cores.

    `size` is the number of processes of a pipeline.
    """

    def __init__(self, plan: BenchPlan, hosts: Sequence[Host], size: int) -> None:
        self._plan, self._hosts, self._size = plan, hosts, size
        self._store = dist.FileStore(plan.store, -1)
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> _Workers:
        cores = sorted(os.sched_getaffinity(0))
        taken = core_of(len(self._hosts), self._size, len(cores))
        for rank, host in enumerate(self._hosts):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),  # all are on this machine, and share its GPUs
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
            pinned = ["taskset", "-c", str(cores[taken[rank]]), *command]
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

    def measure(self, index: int, view: Status, aside: Console) -> None:
        """Measure one contest, on links that have its bandwidth. FailedError if a process ends before.

        The view shows the turns that were taken, and the time that is left; where `aside` is no terminal, a line a
        minute does.
        """
        began, before = time.monotonic(), self._turns()
        printed = began
        self._store.set(shaped(index), "")
        keys = [measured(index, rank) for rank in range(len(self._hosts))]
        while not self._store.check(keys):
            if failed := {rank: code for rank, process in enumerate(self._processes) if (code := process.poll())}:
                rank = min(failed, key=failed.__getitem__)  # one that a signal killed; the others have lost a peer
                said = Path(self._plan.folder, f"output-{rank}").read_text(errors="replace")
                raise FailedError(f"process {rank} of the bench {ended(failed[rank])}:\n{said}")
            now = time.monotonic()
            progress = self._progress(index, self._turns() - before, now - began)
            view.update(progress)
            if not aside.is_terminal and now - printed > _PRINT_SECONDS:
                aside.print(progress, highlight=False)
                printed = now
            time.sleep(_POLL_SECONDS)

    def _turns(self) -> int:
        return self._store.add(TURNS, 0)

    def _progress(self, index: int, taken: int, seconds: float) -> str:
        turns = len(self._plan.shaped if index else self._plan.contenders) * self._plan.repetitions
        said = f"{index + 1} of {self._plan.contests}: turn {min(taken + 1, turns)} of {turns}"
        return f"{said}, {duration_text(seconds / taken * (turns - taken))} left" if taken else said


def _like_aqsgd(unshaped: Contest, ratios: Mapping[float, float]) -> list[float]:
    """The bandwidths in Mbit/s that give these ratios: wire time of an activation over its forward compute."""
    compute, frames = unshaped.compute(), unshaped.frames(REFERENCE)
    forward = max(seconds for (_, task), seconds in compute.items() if task == "forward")
    count, nbytes = frames[0, "activations"]
    return [8e-6 * nbytes / count / (ratio * forward) for ratio in ratios.values()]
