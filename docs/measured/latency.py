"""What the norm of gradients and the exchange of replicas cost where stages are far from each other.

    sudo python docs/measured/latency.py FOLDER [--delay MILLISECONDS] [--steps STEPS]

All first stages of two replicas are on one simulated host, all second stages on another. This process carries every
packet between the two hosts, and holds it for the delay: the kernel's netem, which does this, is not everywhere. Prints
the median seconds of a step, with and without a norm, in turn. Linux only. Takes four minutes.
"""

import argparse
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import select
import statistics
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

HOSTS = {"thinwire-latency-a": "10.9.0.1", "thinwire-latency-b": "10.9.0.2"}
DEVICE = "tw0"
CLONE_NEWNET, TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x40000000, 0x400454CA, 0x0001, 0x1000
RECIPE = ["quickstart", "--replicas.count", "2", "--pipeline.num_stages", "2", "--pipeline.num_microbatches", "2"]
RECIPE += ["--pipeline.microbatch_size", "1", "--data.held_out", "0", "--model.config"]
RECIPE += ["{vocab_size: 256, n_layer: 2, n_embd: 48, n_head: 2, n_positions: 128}"]
RUNS = {
    "exchange in each step, no norm": ["--optimizer.max_grad_norm", "null"],
    "exchange in each step, norm": ["--optimizer.max_grad_norm", "1"],
    "exchange every 20 steps, no norm": ["--replicas.sync.every", "20", "--optimizer.max_grad_norm", "null"],
    "exchange every 20 steps, norm": ["--replicas.sync.every", "20", "--optimizer.max_grad_norm", "1"],
}
WARM_UP = 5


def main() -> None:
    """Measure each run twice, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--delay", type=float, default=40.0, help="milliseconds in one direction")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    for host in HOSTS:
        subprocess.run(["ip", "netns", "add", host], check=True)
    try:
        ends = [joined(host, address) for host, address in HOSTS.items()]
        threading.Thread(target=carry, args=(*ends, given.delay / 1e3), daemon=True).start()
        print(f"{given.delay:g} ms in each direction, load {os.getloadavg()}\n\n| | ms a step, two runs |\n|---|---|")
        ports = itertools.count(29600)
        found: dict[str, list[float]] = {name: [] for name in RUNS}
        for turn, name in itertools.product(range(2), RUNS):
            folder = given.folder / f"{name.replace(' ', '-').replace(',', '')}-{turn}"
            found[name].append(1e3 * step_of(folder, RUNS[name], given.steps, next(ports)))
        for name, times in found.items():
            print(f"| {name} | {', '.join(f'{each:.0f}' for each in times)} |")
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "delete", host], check=True)


def joined(host: str, address: str) -> int:
    """The descriptor of a device in a host: what the host sends is read there, and what is written arrives."""
    libc = ctypes.CDLL(None, use_errno=True)
    made: list[int] = []

    def inside() -> None:  # a thread of its own, because it stays in the host
        with Path(f"/run/netns/{host}").open() as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {host}")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
        for command in (f"addr add {address}/24 dev {DEVICE}", f"link set {DEVICE} mtu 60000 up", "link set lo up"):
            subprocess.run(["ip", *command.split()], check=True)
        made.append(device)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    return made[0]


def carry(first: int, second: int, delay: float) -> None:
    """Carry packets between two devices; each arrives `delay` seconds after it was sent."""
    waiting: list[tuple[float, int, int, bytes]] = []
    count = itertools.count()
    while True:
        now = time.perf_counter()
        while waiting and waiting[0][0] <= now:
            _, _, device, packet = heapq.heappop(waiting)
            os.write(device, packet)
        until = max(0.0, waiting[0][0] - now) if waiting else None
        for device in select.select([first, second], [], [], until)[0]:
            other = second if device == first else first
            packet = os.read(device, 1 << 16)
            heapq.heappush(waiting, (time.perf_counter() + delay, next(count), other, packet))


def step_of(folder: Path, options: list[str], steps: int, port: int) -> float:
    """The median seconds of a step of one run."""
    hosts = [*HOSTS] * 2  # rank = replica * 2 + stage
    given = [*RECIPE, "--training.steps", str(steps), *options, "--output", str(folder)]
    running = []
    for rank, host in enumerate(hosts):
        of_rank = {"RANK": rank, "WORLD_SIZE": len(hosts), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        of_rank |= {"MASTER_ADDR": HOSTS[hosts[0]], "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": DEVICE}
        environment = os.environ | {name: str(value) for name, value in of_rank.items()}
        command = ["ip", "netns", "exec", host, sys.executable, "-m", "thinwire.launch.train", *given]
        running.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    statuses = [process.wait() for process in running]
    if any(statuses):
        sys.exit(f"the run in {folder} failed")
    lines = (folder / "metrics.jsonl").read_text().splitlines()[WARM_UP:]
    return statistics.median(json.loads(line)["seconds"] for line in lines)


if __name__ == "__main__":
    main()
