"""Two hosts on one machine: network namespaces joined by a virtual cable, each sending at most 100 Mbit/s.

Traffic between two processes of one host crosses loopback, which shows neither what a frame costs on a wire nor how
long it takes. Here it crosses an interface with a byte counter and a token bucket. The bucket is smaller than what TCP
hands over in one piece, so the kernel cuts that into packets of 1500 bytes before it counts them, as a card would.
"""

import functools
import json
import os
import shutil
import signal
import subprocess
import time
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

INTERFACE = "wire"
PREFIX = "thinwire-test-"
LIMIT = "tbf rate 100mbit burst 32kbit latency 400ms"


class Host:
    """One network namespace; its only way out is the cable to the other."""

    def __init__(self, name, address):
        self.name, self.address = name, address

    def command(self, arguments):
        """The arguments that run a command there."""
        return ["ip", "netns", "exec", self.name, *arguments]

    def bytes_sent(self):
        """What its end of the cable has counted so far, headers of Ethernet, IP and TCP included."""
        (interface,) = json.loads(_run(f"ip -n {self.name} -s -j link show dev {INTERFACE}"))
        return interface["stats64"]["tx"]["bytes"]


@contextmanager
def two_hosts(limit=LIMIT):
    """Two hosts that reach each other only; removed on leaving, whatever happened, with every process in them."""
    _remove_orphans()
    unique = f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    hosts = [Host(f"{unique}-{index}", f"10.0.0.{index + 1}") for index in range(2)]
    try:
        for host in hosts:
            _run(f"ip netns add {host.name}")
        here, there = (host.name for host in hosts)
        _run(f"ip -n {here} link add {INTERFACE} type veth peer name {INTERFACE} netns {there}")
        for host in hosts:
            _run(f"ip -n {host.name} addr add {host.address}/24 dev {INTERFACE}")
            _run(f"ip -n {host.name} link set lo up")
            _run(f"ip -n {host.name} link set {INTERFACE} up")
            if limit:
                _run(f"tc -n {host.name} qdisc add dev {INTERFACE} root {limit}")
        yield hosts
    finally:
        for host in hosts:
            _remove(host.name)


@functools.cache
def missing():
    """Why there can be no two hosts here; empty when there can."""
    if os.geteuid() != 0:
        return "needs root"
    if absent := [tool for tool in ("ip", "tc") if not shutil.which(tool)]:
        return f"needs {' and '.join(absent)}"
    try:
        with two_hosts():
            return ""
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}`: {error.stderr.strip()}"


def _run(command):
    return subprocess.run(command.split(), check=True, capture_output=True, text=True, timeout=30).stdout


def namespaces():
    """The names of all network namespaces."""
    return {line.split()[0] for line in _run("ip netns list").splitlines()}


def processes_in(name):
    """The pids of all processes in a namespace."""
    return [int(pid) for pid in _run(f"ip netns pids {name}").split()]


def _remove(name):
    if name not in namespaces():
        return
    while inside := processes_in(name):
        for pid in inside:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    _run(f"ip netns del {name}")


def _remove_orphans():
    """Remove what test processes left that were killed themselves."""
    for name in namespaces():
        if name.startswith(PREFIX) and not Path("/proc", name.removeprefix(PREFIX).split("-")[0]).exists():
            with suppress(subprocess.CalledProcessError):
                _remove(name)
