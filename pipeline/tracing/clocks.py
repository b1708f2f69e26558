"""One clock for all processes: each measures how far its own is from that of a reference process.

A process sends its time, the reference answers with its own, and the answer is taken to be from the middle of the round
trip. The shortest of several round trips counts: whatever the two directions took, the offset is within half of it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from thinwire.pipeline.transport import reaching

ROUNDS = 16


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


def _answer(other: int) -> None:
    message = torch.zeros(1, dtype=torch.float64)
    with reaching(f"process {dist.get_rank()} was telling process {other} the time"):
        for _ in range(ROUNDS):
            dist.recv(message, other)
            message[0] = time.perf_counter()
            dist.send(message, other)


def _ask(reference: int) -> Reading:
    answer = torch.zeros(1, dtype=torch.float64)
    with reaching(f"process {dist.get_rank()} was asking process {reference} for the time"):
        asked = time.perf_counter()
        dist.send(answer, reference)
        dist.recv(answer, reference)
        answered = time.perf_counter()
    middle = (asked + answered) / 2
    return Reading(middle, float(answer) - middle, (answered - asked) / 2)
