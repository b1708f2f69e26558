"""Measure `wire.transport: zmq` beside gloo, and beside itself without encryption, which no option offers.

Two processes, in turns, on loopback and over a shaped link.

    python docs/measured/transports.py              # as root, for the shaped link

Prints the tables of transports.md. Both transports are open in the same two processes and take turns, so that what else
the machine does meets both alike; medians of all turns count. It takes 6 minutes on two idle cores.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zmq

from thinwire.launch.bench.links.contenders import Codecs, Thinwire
from thinwire.launch.hosts.namespaces import Cluster, Host
from thinwire.launch.hosts.shaping import INTERFACE
from thinwire.launch.plan.places import real_placement
from thinwire.launch.plan.prepare import prepare
from thinwire.launch.run import recipe
from thinwire.launch.shared.links import Links
from thinwire.pipeline.options import WireOptions
from thinwire.pipeline.processes.zeromq.keys import Keys
from thinwire.pipeline.wire.backends import group_arguments

OPEN = "zmq, not encrypted"
TRANSPORTS = ("gloo", "zmq", OPEN)
MESSAGE = 1 << 20
RECIPE = ["quickstart", "--pipeline.num_stages", "2", "--data.held_out", "0"]
CODECS = {"none": Codecs("none", "none"), "q(4)/q(8)": Codecs("q(4)", "q(8)")}


def main() -> None:
    """Measure everything, or be one of the two processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=9, help="of each transport (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=24, help="of each transport and codec (default: %(default)s)")
    parser.add_argument(
        "--links", nargs="+", choices=["loopback", "shaped"], default=["loopback", "shaped"], help="which to measure"
    )
    parser.add_argument("--bandwidth", type=float, default=100, help="of the link, in Mbit/s (default: %(default)s)")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        work(options)
        return
    found = {}
    if "loopback" in options.links:
        found["loopback"] = measure(options, None)
    if "shaped" in options.links:
        pair = dict.fromkeys([(0, 1), (1, 0)], options.bandwidth)
        with Cluster(Links(num_hosts=2, overrides=pair)) as hosts:
            found[f"{options.bandwidth:g} Mbit/s"] = measure(options, hosts)
    show(found)


def measure(options: argparse.Namespace, hosts: Sequence[Host] | None) -> dict[str, Any]:
    """What process 0 measured, of two on these hosts, or on loopback."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("keys", "open-keys"):
            Keys.fresh().write(Path(folder, name))
        command = [sys.executable, __file__, "--folder", folder]
        command += ["--turns", str(options.turns), "--steps", str(options.steps)]
        interface = {"GLOO_SOCKET_IFNAME": INTERFACE if hosts else "lo", "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                hosts[rank].command(command) if hosts else command,
                env={**os.environ, **interface, "RANK": str(rank)},
            )
            for rank in range(2)
        ]
        assert [process.wait() for process in processes] == [0, 0]
        return json.loads(Path(folder, "found").read_text())


def work(options: argparse.Namespace) -> None:
    """One of the two processes."""
    rank, folder = int(os.environ["RANK"]), Path(options.folder)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=600),
    )
    leave_open(Keys.read(folder / "open-keys"))
    wires = {name: WireOptions(transport=name, keys=str(folder / "keys")) for name in ("gloo", "zmq")}
    wires[OPEN] = WireOptions(transport="zmq", keys=str(folder / "open-keys"))
    groups = {name: dist.new_group(**group_arguments(wire, 2)) for name, wire in wires.items()}
    found = {"latency": {}, "seconds": {}, "cpu": {}, "steps": {}}
    for turn in range(options.turns + 1):
        for name, group in groups.items():
            seconds, cpu, nbytes = throughput(rank, group)
            if turn:  # the first opens connections
                found["latency"].setdefault(name, []).append(latency(rank, group))
                found["seconds"].setdefault(name, []).append(seconds / nbytes)
                found["cpu"].setdefault(name, []).append(cpu / nbytes)
    found["steps"] = {f"{name} {codec}": times for (name, codec), times in train(options, rank, wires, folder).items()}
    if rank == 0:
        (folder / "found").write_text(json.dumps(found))
    dist.barrier()
    for name in ("zmq", OPEN):
        groups[name].shutdown()


def leave_open(keys: Keys) -> None:
    """Let sockets with these keys, and no others, talk without encryption."""
    serve, prove, admits = Keys.serve, Keys.prove, Keys.admits

    def serve_open(self: Keys, socket: zmq.Socket[Any]) -> None:
        if self == keys:
            socket.zap_domain = b"thinwire"
        else:
            serve(self, socket)

    Keys.serve = serve_open  # type: ignore[method-assign]
    Keys.prove = lambda self, socket: None if self == keys else prove(self, socket)  # type: ignore[method-assign]
    Keys.admits = lambda self, mechanism, credentials: (  # type: ignore[method-assign]
        mechanism == b"NULL" if self == keys else admits(self, mechanism, credentials)
    )


def latency(rank: int, group: dist.ProcessGroup, rounds: int = 50) -> float:
    """Median seconds of a message of 8 bytes to the other process: half a round trip."""
    message, taken = torch.zeros(1), []
    for _ in range(rounds):
        started = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                dist.send(message, group=group, group_dst=1 - rank)
            else:
                dist.recv(message, group=group, group_src=1 - rank)
        taken.append((time.perf_counter() - started) / 2)
    return statistics.median(taken)


def throughput(rank: int, group: dist.ProcessGroup) -> tuple[float, float, int]:
    """Seconds and CPU seconds of both processes for messages of 1 MiB one way, at least half a second of them."""
    message, count, seconds, cpu = torch.zeros(MESSAGE, dtype=torch.uint8), 4, 0.0, 0.0
    while seconds < 0.5:
        count *= 2
        dist.barrier()
        before, started = _cpu(), time.perf_counter()
        works = [
            dist.isend(message, group=group, group_dst=1)
            if rank == 0
            else dist.irecv(message, group=group, group_src=0)
            for _ in range(count)
        ]
        for work in works:
            work.wait()
        told = torch.tensor([time.perf_counter() - started, _cpu() - before], dtype=torch.float64)
        both = [torch.zeros_like(told) for _ in range(2)]
        dist.all_gather(both, told)
        seconds, cpu = max(float(one[0]) for one in both), sum(float(one[1]) for one in both)
    return seconds, cpu, count * MESSAGE


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def train(
    options: argparse.Namespace, rank: int, wires: Mapping[str, WireOptions], folder: Path
) -> dict[tuple[str, str], list[float]]:
    """Seconds of steps of the quickstart in two stages, by transport and codec; all take turns."""
    prepared = prepare(recipe.parse(RECIPE))
    where = real_placement(prepared.recipe)
    contenders = {}
    for name, wire in wires.items():
        ready = replace(prepared, recipe=replace(prepared.recipe, wire=wire))
        for codec, codecs in CODECS.items():
            contenders[name, codec] = Thinwire(ready, where, rank, codecs, folder / f"stores-{rank}-{name}-{codec[:4]}")
    size, times = prepared.recipe.pipeline.batch_size, {key: [] for key in contenders}
    for step in range(options.steps + 1):
        ids = (step * size + torch.arange(size)) % len(prepared.data.training)
        # every other turn the other way round, so that none always comes first
        for key in list(contenders) if step % 2 else reversed(list(contenders)):
            dist.barrier()
            started = time.perf_counter()
            contenders[key].step(ids)
            dist.barrier()
            if step:
                times[key].append((time.perf_counter() - started) / size)
    return times


def show(found: Mapping[str, Any]) -> None:
    """The tables, in Markdown."""
    print("| link | transport | Mbit/s | latency, ms | CPU seconds a GB, both ends |\n|---|---|---|---|---|")
    for link, measured in found.items():
        for name in TRANSPORTS:
            speed = 8e-6 / statistics.median(measured["seconds"][name])
            delay = 1e3 * statistics.median(measured["latency"][name])
            cpu = 1e9 * statistics.median(measured["cpu"][name])
            print(f"| {link} | {name} | {speed:.4g} | {delay:.3g} | {cpu:.3g} |")
    print("\n| link | codecs | gloo, samples/s | zmq | zmq, not encrypted | zmq to gloo | zmq to not encrypted |")
    print("|---|---|---|---|---|---|---|")
    for link, measured in found.items():
        for codec in CODECS:
            times = {name: measured["steps"][f"{name} {codec}"] for name in TRANSPORTS}
            speeds = " | ".join(f"{1 / statistics.median(taken):.4g}" for taken in times.values())
            ratios = " | ".join(_ratio(times[name], times["zmq"]) for name in ("gloo", OPEN))
            print(f"| {link} | {codec} | {speeds} | {ratios} |")


def _ratio(before: Sequence[float], after: Sequence[float]) -> str:
    """Median and quartiles of how much faster each step was."""
    ratios = [one / other for one, other in zip(before, after, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
