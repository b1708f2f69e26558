"""The stage processes of this machine: started together, watched, and stopped together.

Their rendezvous is a file in a private folder, and they use loopback, so no other machine can reach a run. A TCP store
of torch would listen on every address, and torch's elastic agents keep pickles in it.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from thinwire.launch.processes import parent
from thinwire.launch.processes.heartbeat import VARIABLE, Hearing, Silence
from thinwire.launch.shared import variables
from thinwire.launch.shared.doing import Doing
from thinwire.launch.shared.exit_codes import Running, signal_group
from thinwire.launch.shared.interfaces import loopback

GRACE = 5.0
"""Seconds that a process gets to end after it was asked to."""

_SETTLE = 0.1
"""Seconds after a failure in which the other processes notice it themselves and report what they waited for."""
_POLL = 0.05
_LOOK = 20
"""Turns of `_POLL` from one look at what the processes share to the next."""


@dataclass
class End:
    """How the processes of a run ended."""

    failed: dict[int, int] = field(default_factory=dict)
    """Exit status by rank, for processes that failed before the launcher stopped any."""
    hung: list[int] = field(default_factory=list)
    """Ranks that did not end when they were asked to, and were killed."""
    silent: dict[int, str] = field(default_factory=dict)
    """By rank, a sentence without subject on each process that was killed for its silence."""
    finished: bool = field(default=False, compare=False)
    """Whether all ended well, even if a signal came."""
    wrong: str = ""
    """What was wrong with what the processes share, in a sentence."""


def environments(num_processes: int, threads: int, folder: Path) -> list[dict[str, str]]:
    """The environment of each stage process, by rank; `folder` is private to this run."""
    common = {
        **loopback(),  # unless the user names another interface
        **os.environ,
        variables.LAUNCHER: str(os.getpid()),
        variables.FAILURES: str(folder),
        variables.RENDEZVOUS: str(folder / "rendezvous"),
        "OMP_NUM_THREADS": str(threads),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_processes)]


Start = Callable[[Mapping[str, str]], Running]
"""Starts a process in an environment."""


def command(words: Sequence[str], held: Sequence[int] = ()) -> Start:
    """A `Start` for a command; `held` are file descriptors that it inherits, such as those of locks."""

    def start(environment: Mapping[str, str]) -> Running:
        inherited = [*held, *([int(environment[VARIABLE])] if VARIABLE in environment else [])]
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, env=environment, pass_fds=inherited, start_new_session=True
        )

    return start


class StageProcesses:
    """Stage processes that are started together, watched, and stopped together; `close` ends them."""

    def __init__(self, heartbeat: float, timeout: float, done: int) -> None:
        self._processes: list[Running] = []
        self._done = done
        self._hearing = Hearing(Silence(heartbeat, timeout, stopped=0.5))
        self._silent: dict[int, str] = {}

    def start(self, start: Start, given: Sequence[Mapping[str, str]]) -> None:
        """Start a process in each environment, in rank order."""
        for rank, environment in enumerate(given):
            with self._hearing.beginning(rank, Doing.BUILDING) as heard:
                self._processes.append(start({**environment, VARIABLE: heard}))

    @property
    def runs(self) -> bool:
        """Whether a process runs."""
        return any(process.poll() is None for process in self._processes)

    @property
    def failed(self) -> dict[int, int]:
        """Exit status by rank of the processes that failed."""
        codes = {rank: process.poll() for rank, process in enumerate(self._processes)}
        return {rank: code for rank, code in codes.items() if code not in (None, self._done)}

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes."""
        for process in self._processes:
            signal_group(process, number)

    def lose_silent(self) -> bool:
        """Kill the processes that have been silent for too long; whether there are any."""
        running = {rank: process.pid for rank, process in enumerate(self._processes) if process.poll() is None}
        self._silent = self._hearing.silent(running)
        for rank in self._silent:
            signal_group(self._processes[rank], signal.SIGKILL)
            self._processes[rank].wait()
        return bool(self._silent)

    def end(self, wrong: str, *, expected: bool) -> End:
        """Stop the processes that still run, and say how all ended; `expected` if a signal ends them."""
        if not expected and self.failed:
            time.sleep(_SETTLE)
        finished = all(process.poll() == self._done for process in self._processes)
        return End({} if expected else self.failed, self._stop(), self._silent, finished, wrong)

    def close(self) -> None:
        """Kill what still runs, and wait for it."""
        for process in self._processes:
            signal_group(process, signal.SIGKILL)
            process.wait()
        self._hearing.close()

    def _stop(self) -> list[int]:
        """Stop processes that still run, at once; the ranks of those that did not end within the grace time."""
        self.signal(signal.SIGINT)
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and self.runs:
            time.sleep(_POLL)
        return [rank for rank, process in enumerate(self._processes) if process.poll() is None]


def run(
    start: Start,
    given: Sequence[Mapping[str, str]],
    came: Sequence[signal.Signals],
    *,
    heartbeat: float = math.inf,
    timeout: float = 0.0,
    saves: bool = False,
    wrong: Callable[[], str] = str,
    done: int = 0,
) -> End:
    """Start a process in each environment, wait, and return how they ended.

    The first of the signals that `came` stops the processes; with `saves` it is passed on, so that they write a
    checkpoint and end by themselves, and a second one stops them. One that is silent for too long is killed; `Silence`
    says what heartbeat and timeout mean. All are stopped once `wrong` says what is wrong with what they share. One ends
    well with the exit status `done`.
    """
    with closing(StageProcesses(heartbeat, timeout, done)) as processes:
        processes.start(start, given)
        said = _wait(processes, came, saves, wrong)
        return processes.end(said, expected=bool(came))


def _wait(processes: StageProcesses, came: Sequence[signal.Signals], saves: bool, wrong: Callable[[], str]) -> str:
    """Wait until all have ended or there is a reason to stop them; what `wrong` said, if that is the reason."""
    asked, turns = False, count()
    while processes.runs:
        if came and saves and not asked:
            asked = True
            print("the run stops after this step and a checkpoint; a second signal stops it at once", file=sys.stderr)
            processes.signal(signal.SIGTERM)
        ended = processes.failed.values()
        if len(came) > asked or any(not asked or code != parent.STOPPED for code in ended):
            return ""
        if processes.lose_silent():
            return ""
        if next(turns) % _LOOK == 0 and (said := wrong()):
            return said
        time.sleep(_POLL)
    return ""
