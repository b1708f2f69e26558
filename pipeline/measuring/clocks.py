"""The clocks of other processes, compared with this process's own.

A process asks, and the reference answers with its time. We assume that the answer comes from the middle of the round
trip. The shortest of several round trips counts. The offset is wrong by at most half of it, even if one direction is
slower than the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist

from thinwire.pipeline.processes.collectives import Kind, receive_numbers, send_numbers
from thinwire.pipeline.processes.transport import reaching

ROUNDS = 16
FEW_ROUNDS = 4
"""Round trips between neighbours, which compare their clocks many times."""


@dataclass(frozen=True)
class Reading:
    """One reading of the reference's clock. All values are in seconds."""

    at: float
    """The time of the reading, by this process's own clock."""
    offset: float
    """The reference's time minus this process's time."""
    error: float
    """The most that the offset can be wrong."""


@dataclass(frozen=True)
class Clock:
    """This process's clock and the reference's, compared twice."""

    first: Reading
    last: Reading

    @property
    def drift(self) -> float:
        """The growth of the offset, in seconds per second; 0 if the errors of the readings can explain it."""
        moved = self.last.offset - self.first.offset
        if abs(moved) <= self.first.error + self.last.error:
            return 0.0
        return moved / (self.last.at - self.first.at)

    @property
    def error(self) -> float:
        """The most that a time near a reading, or between the two if the drift is steady, can be wrong, in seconds."""
        return max(self.first.error, self.last.error)

    def reference(self, local: float) -> float:
        """A time of this process's clock, converted to the reference's clock."""
        return local + self.last.offset + self.drift * (local - self.last.at)

    def local(self, reference: float) -> float:
        """A time of the reference's clock, converted to this process's clock."""
        return self.last.at + (reference - self.last.offset - self.last.at) / (1 + self.drift)


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

    def line(self, process: int) -> tuple[float, float] | None:
        """(a, b): a time t of this process's clock is a * t + b of another's; None if the two were never compared."""
        if process not in self._clocks:
            return None
        clock = self._clocks[process]
        return 1 + clock.drift, clock.last.offset - clock.drift * clock.last.at


def read_clock(reference: int) -> Reading:
    """Compare this process's clock with the clock of process `reference`; collective over the default group.

    Raises PeerError when a process is gone or silent.
    """
    mine = dist.get_rank()
    if mine == reference:
        # one process after the other: a reading is short only if the reference serves nobody else
        for other in range(dist.get_world_size()):
            if other != reference:
                _answer(other)
        return Reading(time.perf_counter(), 0.0, 0.0)
    return min((_ask(reference) for _ in range(ROUNDS)), key=lambda reading: reading.error)


def _read_pair(other: int, *, asks: bool) -> Reading:
    """One reading of another process's clock. The process that asks computes it, and sends it to the other."""
    if asks:
        found = min((_ask(other) for _ in range(FEW_ROUNDS)), key=lambda reading: reading.error)
        theirs = [found.at + found.offset, -found.offset, found.error]
        with reaching(f"process {dist.get_rank()} was sending process {other} the offset of its clock"):
            send_numbers(Kind.CLOCK, theirs, other)
        return found
    _answer(other, FEW_ROUNDS)
    with reaching(f"process {dist.get_rank()} was waiting for process {other} to send the offset of its clock"):
        return Reading(*receive_numbers(Kind.CLOCK, 3, other))


def _answer(other: int, rounds: int = ROUNDS) -> None:
    with reaching(f"process {dist.get_rank()} was waiting to send process {other} the time"):
        for _ in range(rounds):
            receive_numbers(Kind.CLOCK, 1, other)
            send_numbers(Kind.CLOCK, [time.perf_counter()], other)


def _ask(reference: int) -> Reading:
    with reaching(f"process {dist.get_rank()} was waiting for the time of process {reference}"):
        asked = time.perf_counter()
        send_numbers(Kind.CLOCK, [asked], reference)
        [answer] = receive_numbers(Kind.CLOCK, 1, reference)
        answered = time.perf_counter()
    middle = (asked + answered) / 2
    return Reading(middle, answer - middle, (answered - asked) / 2)
