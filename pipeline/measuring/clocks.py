"""The clocks of other processes, compared with this process's own.

A process asks, and the other answers with its time. We assume that the answer comes from the middle of the round
trip. The shortest of several round trips counts. The offset is wrong by at most half of it, even if one direction is
slower than the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist

from thinwire.pipeline.processes.collectives import NoteKind, receive_numbers, send_numbers
from thinwire.pipeline.processes.transport import reaching

ROUNDS = 4
"""Round trips of a reading: neighbours compare their clocks many times."""


@dataclass(frozen=True)
class Reading:
    """One reading of another process's clock. All values are in seconds."""

    at: float
    """The time of the reading, by this process's own clock."""
    offset: float
    """The other process's time minus this process's time."""
    error: float
    """The most that the offset can be wrong."""


@dataclass(frozen=True)
class Clock:
    """This process's clock and another's, compared twice."""

    first: Reading
    last: Reading

    @property
    def drift(self) -> float:
        """The growth of the offset, in seconds per second; 0 if the errors of the readings can explain it."""
        moved = self.last.offset - self.first.offset
        if abs(moved) <= self.first.error + self.last.error:
            return 0.0
        return moved / (self.last.at - self.first.at)

    def local(self, theirs: float) -> float:
        """A time of the other process's clock, converted to this process's clock."""
        return self.last.at + (theirs - self.last.offset - self.last.at) / (1 + self.drift)


class NeighbourClocks:
    """The clocks of neighbours: processes that share a boundary with this one, or hold its stages in another replica.

    They are empty until `read`.
    """

    def __init__(self) -> None:
        self._clocks: dict[int, Clock] = {}

    def read(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Compare the clocks of each pair of processes. Every process calls this with the same pairs in one order.

        A change since the first reading counts as drift, and the drift is assumed to go on. With readings after steps
        1, 2, 4, 8 and so on, a time is wrong by at most about three times the error of a reading, if the drift is
        steady.

        Raises PeerError when a process is gone or silent.
        """
        # the same order everywhere: a process that is asked out of turn would wait for a process that waits for it
        for asking, answering in pairs:
            if (mine := dist.get_rank()) in (asking, answering):
                other = answering if mine == asking else asking
                reading = _read_pair(other, asks=mine == asking)
                self._clocks[other] = Clock(self._clocks[other].first if other in self._clocks else reading, reading)

    def local(self, process: int, theirs: float) -> float | None:
        """A time of another process's clock, converted to this process's; None if the two were never compared."""
        return self._clocks[process].local(theirs) if process in self._clocks else None


def _read_pair(other: int, *, asks: bool) -> Reading:
    """One reading of another process's clock. The process that asks computes it, and sends it to the other."""
    if asks:
        found = min((_ask(other) for _ in range(ROUNDS)), key=lambda reading: reading.error)
        theirs = [found.at + found.offset, -found.offset, found.error]
        with reaching(f"process {dist.get_rank()} was sending process {other} the offset of its clock"):
            send_numbers(NoteKind.CLOCK, theirs, other)
        return found
    _answer(other)
    with reaching(f"process {dist.get_rank()} was waiting for process {other} to send the offset of its clock"):
        return Reading(*receive_numbers(NoteKind.CLOCK, 3, other))


def _answer(other: int) -> None:
    with reaching(f"process {dist.get_rank()} was waiting to send process {other} the time"):
        for _ in range(ROUNDS):
            receive_numbers(NoteKind.CLOCK, 1, other)
            send_numbers(NoteKind.CLOCK, [time.perf_counter()], other)


def _ask(other: int) -> Reading:
    with reaching(f"process {dist.get_rank()} was waiting for the time of process {other}"):
        asked = time.perf_counter()
        send_numbers(NoteKind.CLOCK, [asked], other)
        [answer] = receive_numbers(NoteKind.CLOCK, 1, other)
        answered = time.perf_counter()
    middle = (asked + answered) / 2
    return Reading(middle, answer - middle, (answered - asked) / 2)
