"""The stage processes of this machine: started together, watched, and stopped together.

They meet through a file in a private folder and use loopback, so no other machine can reach a run. A TCP store of torch
would listen on every address, and torch's elastic agents keep pickles in it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from thinwire.launch.run import failures, parent

MEETING_VARIABLE = "THINWIRE_MEETING"
"""The file through which the processes that `thinwire train` starts meet."""

GRACE = 5.0
"""Seconds that a process gets to end after SIGTERM."""

_SETTLE = 0.1
"""Seconds after a failure in which the other processes notice it themselves and report what they waited for."""
_POLL = 0.05


@dataclass
class End:
    """How the processes of a run ended."""

    failed: dict[int, int] = field(default_factory=dict)
    """Exit status by rank, for processes that failed before the launcher stopped any."""
    hung: list[int] = field(default_factory=list)
    """Ranks that did not end after SIGTERM and were killed."""


def environments(num_processes: int, threads: int, folder: Path) -> list[dict[str, str]]:
    """The environment of each stage process, by rank; `folder` is private to this run."""
    common = {
        **_loopback(),
        **os.environ,
        parent.VARIABLE: str(os.getpid()),
        failures.FOLDER_VARIABLE: str(folder),
        MEETING_VARIABLE: str(folder / "meeting"),
        "OMP_NUM_THREADS": str(threads),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_processes)]


class Process(Protocol):
    """A started process, in a session of its own so that only the launcher gets Ctrl-C."""

    pid: int

    def poll(self) -> int | None:
        """Its return code; None while it runs."""

    def wait(self) -> int:
        """Wait until it has ended; its return code."""


Start = Callable[[Mapping[str, str]], Process]
"""Starts a process in an environment."""


def command(words: Sequence[str], held: Sequence[int] = ()) -> Start:
    """A `Start` for a command; `held` are file descriptors that it inherits, such as those of locks."""

    def start(environment: Mapping[str, str]) -> Process:
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, env=environment, pass_fds=held, start_new_session=True)

    return start


def run(start: Start, given: Sequence[Mapping[str, str]], came: Sequence[signal.Signals]) -> End:
    """Start a process in each environment, wait, and return how they ended.

    Args:
        start: starts one process.
        given: the environment of each process, in rank order.
        came: the signals that this process got so far; the first one stops the processes.
    """
    processes: list[Process] = []
    try:
        for environment in given:
            processes.append(start(environment))
        while not came and not _failed(processes) and any(process.poll() is None for process in processes):
            time.sleep(_POLL)
        if not came and _failed(processes):
            time.sleep(_SETTLE)
        return End(_failed(processes) if not came else {}, _stop(processes))
    finally:
        for process in processes:
            _signal(process, signal.SIGKILL)
            process.wait()


def _failed(processes: Sequence[Process]) -> dict[int, int]:
    return {rank: code for rank, process in enumerate(processes) if (code := process.poll())}


def _stop(processes: Sequence[Process]) -> list[int]:
    """Send SIGTERM to processes that still run; the ranks of those that did not end within the grace time."""
    for process in processes:
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(_POLL)
    return [rank for rank, process in enumerate(processes) if process.poll() is None]


def _signal(process: Process, number: signal.Signals) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _loopback() -> dict[str, str]:
    """The interface that gloo uses if the user names none."""
    known = {name for _, name in socket.if_nameindex()}
    return next(({"GLOO_SOCKET_IFNAME": name} for name in ("lo", "lo0") if name in known), {})
