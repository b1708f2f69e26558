"""The stage processes of this machine: started together, watched, and stopped together.

They meet through a file in a private folder and speak over loopback, so that nothing of a run can be reached from
another machine: a store of torch's would listen on every address, and torch's elastic agents keep pickles in one.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.launch.run import failures, parent

MEETING_VARIABLE = "THINWIRE_MEETING"
"""The file through which the processes that `thinwire train` starts meet."""

GRACE = 5.0
"""Seconds that a process has to end once it was told to."""

_SETTLE = 0.1
"""Seconds in which others notice a failure by themselves, and say what they were waiting for."""
_POLL = 0.05


@dataclass
class End:
    """How the processes of a run ended."""

    failed: dict[int, int] = field(default_factory=dict)
    """Exit status by rank of those that ended badly before any was told to stop."""
    hung: list[int] = field(default_factory=list)
    """Ranks that did not end when they were told to, and were killed."""


def environments(num_processes: int, threads: int, folder: Path) -> list[dict[str, str]]:
    """What each stage process finds in its environment, by rank; `folder` is private to this run."""
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


def run(
    command: Sequence[str],
    given: Sequence[Mapping[str, str]],
    came: Sequence[signal.Signals],
    held: Sequence[int] = (),
) -> End:
    """Run a command once in each environment; how it ended.

    Args:
        command: what each process runs.
        given: the environment of each, in rank order.
        came: signals to this process so far; at the first the processes are stopped.
        held: file descriptors that the processes inherit, such as those of locks.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for environment in given:
            processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    pass_fds=held,
                    start_new_session=True,  # the terminal's Ctrl-C comes to us alone
                )
            )
        while not came and not _failed(processes) and any(process.poll() is None for process in processes):
            time.sleep(_POLL)
        if not came and _failed(processes):
            time.sleep(_SETTLE)
        return End(_failed(processes) if not came else {}, _stop(processes))
    finally:
        for process in processes:
            _signal(process, signal.SIGKILL)
            process.wait()


def _failed(processes: Sequence[subprocess.Popen[bytes]]) -> dict[int, int]:
    return {rank: code for rank, process in enumerate(processes) if (code := process.poll())}


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Tell those that run to end; the ranks that did not within the grace time."""
    for process in processes:
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(_POLL)
    return [rank for rank, process in enumerate(processes) if process.poll() is None]


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _loopback() -> dict[str, str]:
    """Where gloo listens unless the user says otherwise."""
    known = {name for _, name in socket.if_nameindex()}
    return next(({"GLOO_SOCKET_IFNAME": name} for name in ("lo", "lo0") if name in known), {})
