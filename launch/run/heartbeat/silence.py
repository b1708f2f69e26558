"""Who has been silent for too long: kept by the launcher for its processes, and by a process for its neighbours.

A process may be silent for `STARTING` seconds before its first step and after its last, because libraries keep Python's
lock (the GIL) while they are loaded. A process that the system calls stopped gets no such time. Its launcher waits for
half of the usual time only: the system knows a stop from long work, and on a busy machine all takes longer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from thinwire.launch.run.heartbeat.pulse import EVERY, TRAINING, VARIABLE

STARTING = 60.0
"""Seconds for which a process may be silent while it does not train."""


class Silence:
    """How long each of several processes has been silent.

    Args:
        allowed: seconds for which a process that trains may be silent.
        clock: the time in seconds.
        stopped: seconds for which a stopped process may be silent; None for as long as any other.
    """

    def __init__(
        self, allowed: float, clock: Callable[[], float] = time.monotonic, *, stopped: float | None = None
    ) -> None:
        self.allowed, self._clock = allowed, clock
        self._stopped = allowed if stopped is None else stopped
        self._heard: dict[int, tuple[float, bool]] = {}
        self._looked = clock()

    def heard(self, rank: int, trains: bool) -> None:
        """Note a beat of a process, and whether it trains."""
        self._heard[rank] = (self._clock(), trains)

    def forget(self, rank: int) -> None:
        """Expect no more beats of a process."""
        self._heard.pop(rank, None)

    def too_long(self, is_stopped: Callable[[int], bool] = lambda rank: False) -> dict[int, float]:
        """The seconds of silence of every process that has been silent for too long, by rank."""
        now = self._clock()
        passed = now - self._looked
        if passed > 2 * EVERY:  # this process had no turn itself, so it could hear nobody: that time does not count
            self._heard = {rank: (min(now, last + passed), trains) for rank, (last, trains) in self._heard.items()}
        self._looked = now
        silent = {rank: now - last for rank, (last, _) in self._heard.items()}
        return {
            rank: seconds
            for rank, seconds in silent.items()
            if seconds > (self.allowed if self._heard[rank][1] else max(self.allowed, STARTING))
            or (seconds > self._stopped and is_stopped(rank))
        }


class Hearing:
    """The heartbeats of started processes, as their launcher hears them.

    Args:
        allowed: seconds for which a process that trains may be silent.
    """

    def __init__(self, allowed: float) -> None:
        self._silence, self._pipes = Silence(allowed, stopped=allowed / 2), dict[int, int]()

    @contextmanager
    def beginning(self, rank: int, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
        """The environment in which a process is started inside, so that it is heard."""
        self._pipes[rank], writing = os.pipe()
        for descriptor in (self._pipes[rank], writing):
            os.set_blocking(descriptor, False)
        self._silence.heard(rank, trains=False)
        try:
            yield {**environment, VARIABLE: str(writing)}
        finally:
            os.close(writing)

    def silent(self, pids: Mapping[int, int]) -> dict[int, float]:
        """The seconds of silence of every process that has been silent for too long, of those with these pids."""
        for rank, pipe in self._pipes.items():
            with suppress(BlockingIOError):
                if beats := os.read(pipe, 1 << 16):
                    self._silence.heard(rank, beats.endswith(TRAINING))
            if rank not in pids:
                self._silence.forget(rank)
        return self._silence.too_long(lambda rank: is_stopped(pids[rank]))

    def close(self) -> None:
        """Hear nobody any more."""
        for pipe in self._pipes.values():
            os.close(pipe)


def is_stopped(pid: int) -> bool:
    """Whether the system has stopped a process, as after SIGSTOP or in a debugger; False where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def sentence(who: str, seconds: float, allowed: float) -> str:
    """What silence means, and which option allows more of it."""
    if seconds <= allowed:
        return (
            f"{who} is stopped, as by SIGSTOP or a debugger, and sent no heartbeat for {seconds:.1f} s; wire.heartbeat "
            f"of {allowed:g} s allows half of that to a stopped process"
        )
    return (
        f"{who} sent no heartbeat for {seconds:.1f} s, and wire.heartbeat allows {allowed:g} s: the process is "
        f"stopped, or something keeps Python's lock (the GIL), or the host or the link is gone"
    )
