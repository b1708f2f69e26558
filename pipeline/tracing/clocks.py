"""The clocks of other processes: how far each is from this process's own.

A process sends its time, the reference answers with its own, and the answer is taken to be from the middle of the round
trip. The shortest of several round trips counts: whatever the two directions took, the offset is within half of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from thinwire.pipeline.transport import reaching

ROUNDS = 16
FEW_ROUNDS = 4
"""Between neighbours, who compare their clocks again and again."""


@dataclass(frozen=True)
class Reading:
    """One look at the reference's clock."""

    at: float
    """When, by this process's own clock, in seconds."""
    offset: float
    """What to add to this process's clock to have the reference's."""
    error: float
    """How far off the offset can be at most."""


@dataclass(frozen=True)
class Clock:
    """This process's clock against the reference's, looked at twice."""

    first: Reading
    last: Reading

    @property
    def drift(self) -> float:
        """Seconds a second that the offset grows by; 0 where the readings may differ by their errors alone."""
        moved = self.last.offset - self.first.offset
        if abs(moved) <= self.first.error + self.last.error:
            return 0.0
        return moved / (self.last.at - self.first.at)

    @property
    def error(self) -> float:
        """How far off a time near the readings can be at most; between them too, if the drift is steady."""
        return max(self.first.error, self.last.error)

    def reference(self, local: float) -> float:
        """A time of this process's clock on the reference's."""
        return local + self.last.offset + self.drift * (local - self.last.at)

    def local(self, reference: float) -> float:
        """A time of the reference's clock on this process's."""
        return self.last.at + (reference - self.last.offset - self.last.at) / (1 + self.drift)


class NeighbourClocks:
    """The clocks of the processes that this one shares boundaries with, as far as they were read."""

    def __init__(self) -> None:
        self._clocks: dict[int, Clock] = {}

    def read(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Compare the clocks of each of these pairs of processes; every process does, with the same pairs in order.

        What moved since the first reading is taken for drift, which goes on: read after 1, 2, 4, 8 ... steps, a clock
        is never further off than about three times the error of a reading, as long as the drift is steady.

        Raises PeerError when a process is gone or silent.
        """
        for asking, answering in pairs:
            if (mine := dist.get_rank()) in (asking, answering):
                other = answering if mine == asking else asking
                reading = _read_pair(other, asks=mine == asking)
                self._clocks[other] = Clock(self._clocks[other].first if other in self._clocks else reading, reading)

    def local(self, process: int, theirs: float) -> float | None:
        """A time of a process's clock on this process's; None where the two were never compared."""
        return self._clocks[process].local(theirs) if process in self._clocks else None


def read_clock(reference: int) -> Reading:
    """Compare this process's clock with the reference's; collective over the default group.

    Raises PeerError when a process is gone or silent.
    """
    mine = dist.get_rank()
    if mine == reference:
        for other in range(dist.get_world_size()):
            if other != reference:
                _answer(other)
        return Reading(time.perf_counter(), 0.0, 0.0)
    return min((_ask(reference) for _ in range(ROUNDS)), key=lambda reading: reading.error)


def _read_pair(other: int, *, asks: bool) -> Reading:
    """One reading of another process's clock, found by the process that asks and told to the one that answers."""
    if asks:
        found = min((_ask(other) for _ in range(FEW_ROUNDS)), key=lambda reading: reading.error)
        theirs = [found.at + found.offset, -found.offset, found.error]
        with reaching(f"process {dist.get_rank()} was sending process {other} how far its clock is"):
            dist.send(torch.tensor(theirs, dtype=torch.float64), other)
        return found
    _answer(other, FEW_ROUNDS)
    told = torch.zeros(3, dtype=torch.float64)
    with reaching(f"process {dist.get_rank()} was waiting for process {other} to say how far its clock is"):
        dist.recv(told, other)
    return Reading(*told.tolist())


def _answer(other: int, rounds: int = ROUNDS) -> None:
    message = torch.zeros(1, dtype=torch.float64)
    with reaching(f"process {dist.get_rank()} was waiting to tell process {other} the time"):
        for _ in range(rounds):
            dist.recv(message, other)
            message[0] = time.perf_counter()
            dist.send(message, other)


def _ask(reference: int) -> Reading:
    answer = torch.zeros(1, dtype=torch.float64)
    with reaching(f"process {dist.get_rank()} was waiting for the time of process {reference}"):
        asked = time.perf_counter()
        dist.send(answer, reference)
        dist.recv(answer, reference)
        answered = time.perf_counter()
    middle = (asked + answered) / 2
    return Reading(middle, float(answer) - middle, (answered - asked) / 2)
