"""Simulated hosts: making and removing network namespaces, and links of a chosen speed between them.

The name of a namespace has the pid and the start time of the process that made it. So the namespaces of killed
processes can be found and removed.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

from thinwire.errors import ThinwireError
from thinwire.launch.hosts import shaping
from thinwire.launch.shared import scratch
from thinwire.launch.shared.links import Links
from thinwire.launch.shared.probes import probe_namespace

NETWORK_PREFIX = "thinwire-cluster"
_serial = itertools.count()


class ClusterError(ThinwireError, RuntimeError):
    """This machine cannot make the hosts or links. The message says what to change."""


class Host:
    """One network namespace. One cable joins it to the switch; it has no other connection."""

    def __init__(self, name: str, index: int) -> None:
        self.name, self.index, self.address = name, index, shaping.address(index)

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The arguments that run a command on this host."""
        return ["ip", "netns", "exec", self.name, *arguments]


class Cluster:
    """Hosts that reach only each other, over links of a chosen speed.

        with Cluster(Links(num_hosts=2, bandwidth=100)) as hosts:
            subprocess.run(hosts[0].command(["ping", "-c1", hosts[1].address]))

    At the end, after errors too, the hosts are removed with all processes in them. At the start, the hosts of killed
    processes are removed.

    Raises:
        ClusterError: this machine cannot make such links.
    """

    def __init__(self, links: Links) -> None:
        self.links = links
        self._prefix = f"{NETWORK_PREFIX}-{scratch.owner()}-{next(_serial)}"

    def __enter__(self) -> list[Host]:
        if reason := missing(self.links):
            raise ClusterError(reason)
        remove_orphans()
        try:
            for command in shaping.creation(self._prefix, self.links.num_hosts):
                _run(command)
            for command in shaping.shaping(self._prefix, self.links):
                _run(command)
        except BaseException:
            self._remove()
            raise
        return [Host(shaping.name(self._prefix, index), index) for index in range(self.links.num_hosts)]

    def __exit__(self, *exception: object) -> None:
        self._remove()

    def reshape(self, links: Links) -> None:
        """Change bandwidths, latency and loss of a running cluster. Packets in queues are lost."""
        if links.num_hosts != self.links.num_hosts:
            raise ClusterError(
                f"a cluster cannot change its number of hosts, got {links.num_hosts} in place of {self.links.num_hosts}"
            )
        if reason := missing(links):
            raise ClusterError(reason)
        for command in shaping.unshaping(self._prefix, self.links):
            _run(command)
        self.links = links
        for command in shaping.shaping(self._prefix, links):
            _run(command)

    def _remove(self) -> None:
        for name in _namespaces():
            if name.startswith(f"{self._prefix}-"):
                _remove(name)


def missing(links: Links) -> str:
    """The reason why this machine cannot make such a cluster, and what to change. Empty if it can."""
    if os.geteuid() != 0:
        return "a cluster needs root, for network namespaces and traffic control; start the command with sudo"
    if absent := [tool for tool in ("ip", "tc") if not shutil.which(tool)]:
        return f"a cluster needs {' and '.join(absent)}; install iproute2"
    for kind in ("", *shaping.kinds(links)):
        finding = probe_namespace(*filter(None, [kind]))
        if finding.verdict != "ok":
            return _ADVICE[kind.partition(" ")[0]].format(found=finding.found)
    return ""


_ADVICE = {
    "": "a cluster needs network namespaces, but this machine cannot make them ({found}); in a container, add "
    "--privileged",
    "tbf": "a bandwidth needs the kernel's tbf ({found}); load it with `modprobe sch_tbf`, or remove --bandwidth",
    "htb": "a link with its own bandwidth needs the kernel's htb ({found}); load it with `modprobe sch_htb`, or remove "
    "--link",
    "netem": "latency and loss need the kernel's netem ({found}); load it with `modprobe sch_netem`, or remove "
    "--latency and --loss",
}


def remove_orphans() -> list[str]:
    """Remove the namespaces of processes that have ended, with all processes in them; return their names."""
    orphans = [name for name in _namespaces() if name.startswith(f"{NETWORK_PREFIX}-") and not _in_use(name)]
    for name in orphans:
        with suppress(ClusterError):  # another process may be removing it as well
            _remove(name)
    return orphans


def processes_in(name: str) -> list[int]:
    """The pids of all processes in a namespace."""
    return [int(pid) for pid in _run(["ip", "netns", "pids", name]).split()]


def _remove(name: str) -> None:
    while inside := processes_in(name):
        for pid in inside:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    _run(["ip", "netns", "del", name])


def _namespaces() -> set[str]:
    return {line.split()[0] for line in _run(["ip", "netns", "list"]).splitlines()}


def _in_use(name: str) -> bool:
    pid, started = name.removeprefix(f"{NETWORK_PREFIX}-").split("-")[:2]
    return scratch.is_alive(f"{pid}-{started}")


def _run(command: Sequence[str]) -> str:
    """Run a command and return its output. It has its own process group, so Ctrl-C does not stop it half-way."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30, process_group=0).stdout
    except subprocess.CalledProcessError as error:
        raise ClusterError(f"`{' '.join(command)}`: {error.stderr.strip()}") from error
