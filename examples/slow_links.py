"""A command on several hosts of one Linux machine, with slow links between them.

    sudo python examples/slow_links.py --hosts 4 --rate 100mbit -- thinwire train quickstart
    sudo python examples/slow_links.py --hosts 2 --rate 1gbit --delay 20ms -- python own_loop.py
    sudo python examples/slow_links.py --hosts 4 --rate 1gbit,1gbit,1gbit,20mbit -- thinwire train quickstart

A host is a network namespace with an address of its own, on a switch that reaches nothing else: data and models must be
there already. `tc` shapes what it sends and what it receives; it and `ip` are of iproute2. Each host is one process of
torch.distributed: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME are set. torchrun takes the hosts
from PET_NNODES, PET_NODE_RANK and so on, so `torchrun --nproc-per-node 2 script.py` is one group over all hosts. The
status is that of the first command that failed. At the end the hosts are removed, with what still runs there.
Where sudo forgets the PATH of your environment: `sudo env PATH="$PATH" python examples/slow_links.py ..`.
"""

import argparse
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PREFIX = "thinwire-hosts"
WIRE = "wire"
"""The interface of a host."""
PORT = "29500"
GRACE = 10.0
"""Seconds for the other hosts to end once one has failed."""
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_serial = itertools.count()


@dataclass(frozen=True)
class Host:
    """A network namespace."""

    name: str
    index: int

    @property
    def address(self) -> str:
        """Its IPv4 address."""
        return f"10.0.0.{self.index + 1}"

    def command(self, words: Sequence[str]) -> list[str]:
        """The words that run a command there."""
        return ["ip", "netns", "exec", self.name, *words]


@contextmanager
def hosts(count: int, rate: str = "none", delay: str = "") -> Iterator[list[Host]]:
    """Make hosts, each of which sends and receives at `rate`, such as 100mbit; packets from a host take `delay` more.

    With a rate for each it is a list, such as 1gbit,1gbit,20mbit. Hosts of killed processes go first. ValueError if
    there are not as many rates; CalledProcessError, with what `ip` or `tc` said, where there can be no hosts.
    """
    for name in _namespaces():
        owner = name.removeprefix(f"{PREFIX}-").partition("-")[0]
        if name.startswith(f"{PREFIX}-") and not Path("/proc", owner).exists():
            with suppress(subprocess.CalledProcessError):  # another process may be removing it as well
                remove(name)
    rates = rate.split(",") * (1 if "," in rate else count)
    if len(rates) != count:
        raise ValueError(f"--rate must be one rate, or one for each of {count} hosts, got {rate}")
    prefix = f"{PREFIX}-{os.getpid()}-{next(_serial)}"
    switch, made = f"{prefix}-switch", [Host(f"{prefix}-{index}", index) for index in range(count)]
    try:
        run(f"ip netns add {switch}")
        run(f"ip -n {switch} link add bridge up type bridge")
        for host, its_rate in zip(made, rates, strict=True):
            here, port = host.name, f"port{host.index}"
            run(f"ip netns add {here}")
            run(f"ip -n {here} link add {WIRE} type veth peer name {port} netns {switch}")
            run(f"ip -n {switch} link set {port} master bridge up")
            run(f"ip -n {here} addr add {host.address}/24 dev {WIRE}")
            run(f"ip -n {here} link set lo up")
            run(f"ip -n {here} link set {WIRE} up")
            shape(f"tc -n {here} qdisc add dev {WIRE}", its_rate, delay)
            shape(f"tc -n {switch} qdisc add dev {port}", its_rate, "")
        yield made
    finally:
        for name in _namespaces():
            if name.startswith(f"{prefix}-"):
                remove(name)


def shape(add: str, rate: str, delay: str) -> None:
    """Put a token bucket on an interface, and the delay in it."""
    if rate != "none":
        # TCP sends up to 64 kB in one piece, which the kernel cuts into packets where the bucket is smaller. But it
        # must hold what comes while the kernel's timer is late: with 200 us, one stream reached 0.95 of the rate from
        # 20 Mbit/s to 10 Gbit/s
        burst = max(4000, int(bits_of(rate) / 8 * 200e-6) + 1)
        run(f"{add} root handle 1: tbf rate {rate} burst {burst}b latency 400ms")
    if delay:
        run(f"{add} {'root' if rate == 'none' else 'parent 1:'} handle 2: netem limit 100000 delay {delay}")


def bits_of(rate: str) -> float:
    """Bits a second of a rate such as 100mbit. ValueError if it has another form."""
    if rate[-4:] not in _BITS:
        raise ValueError(f"a rate must be like 500kbit, 100mbit or 1gbit, got {rate}")
    return float(rate[:-4]) * _BITS[rate[-4:]]


def remove(name: str) -> None:
    """Remove a namespace and all processes in it."""
    while inside := run(f"ip netns pids {name}").split():
        for pid in inside:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)
    run(f"ip netns del {name}")


def run(command: str) -> str:
    """Run a command in a process group of its own, so that Ctrl-C does not stop it half-way; what it prints."""
    return subprocess.run(command.split(), check=True, capture_output=True, text=True, process_group=0).stdout


def _namespaces() -> list[str]:
    return [line.split()[0] for line in run("ip netns list").splitlines()]


def started(
    host: Host, count: int, words: Sequence[str], *, pin: bool
) -> tuple[subprocess.Popen[str], threading.Thread]:
    """A command on a host, and the thread that writes its lines here, each with the host's number before it."""
    where = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": PORT}
    ours = {**where, "RANK": str(host.index), "WORLD_SIZE": str(count), "GLOO_SOCKET_IFNAME": WIRE}
    torchrun = {"NNODES": str(count), "NODE_RANK": str(host.index), **where}
    environment = {**os.environ, **ours, **{f"PET_{name}": value for name, value in torchrun.items()}}
    process = subprocess.Popen(
        host.command(words),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(process.pid, {cores[host.index % len(cores)]})

    def relay() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"host {host.index} | {line}", end="", flush=True)

    relaying = threading.Thread(target=relay, daemon=True)
    relaying.start()
    return process, relaying


def ended(processes: Sequence[subprocess.Popen[str]]) -> int:
    """Wait for all commands; the status of the first that failed, after which the others get time to end."""
    status, deadline = 0, float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        failed = next((process.returncode for process in processes if process.poll()), 0)
        if failed and not status:
            status, deadline = failed if failed > 0 else 128 - failed, time.monotonic() + GRACE
        time.sleep(0.05)
    failed = next((process.returncode for process in processes if process.poll()), 0)
    return status or (failed if failed >= 0 else 128 - failed)


def main() -> int:
    """Make the hosts, run the command on each, and remove them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument(
        "--rate",
        default="none",
        help="what a host can send, and receive: 500kbit, 100mbit, 1gbit, none; or a list, with one for each host",
    )
    parser.add_argument("--delay", default="", help="from one host to another, such as 20ms; needs netem in the kernel")
    parser.add_argument("--pin", action="store_true", help="give each host one core, as far as there are enough")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    options = parser.parse_args()
    words = options.command[options.command[:1] == ["--"] :]
    if not words:
        parser.error("a command must follow --")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with hosts(options.hosts, options.rate, options.delay) as made:
            running = [started(host, len(made), words, pin=options.pin) for host in made]
            status = ended([process for process, _ in running])
        for _, relaying in running:
            relaying.join()
        return status
    except subprocess.CalledProcessError as error:
        print(f"`{' '.join(error.cmd)}`: {error.stderr.strip().partition(chr(10))[0]}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:  # no iproute2, or another form of rate
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
