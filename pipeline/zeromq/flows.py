"""Both ends of a flow of packets from one process to another, over one connection after the other.

Packets are numbered from 0. The receiving end takes them in that order and each once; it acknowledges the number that
it expects next. The sending end keeps what is not acknowledged. When a connection is new, the receiving end says what
it expects, and the sending end begins there. So whatever connections lose, each packet is taken exactly once and in
order, as long as both processes live.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Outflow(Generic[T]):
    """The sending end: packets that are not acknowledged."""

    def __init__(self) -> None:
        self._first = 0
        self._kept: deque[T] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, packet: T) -> int:
        """Keep a packet; its number."""
        self._kept.append(packet)
        return self._first + len(self._kept) - 1

    def acknowledge(self, expected: int) -> list[T] | None:
        """Let go of the packets before number `expected`, and return them; None if no such number was sent."""
        if expected > self._first + len(self._kept):
            return None
        gone = [self._kept.popleft() for _ in range(expected - self._first)]
        self._first += len(gone)
        return gone

    def kept(self) -> Iterator[tuple[int, T]]:
        """What is to be sent over a new connection, with numbers."""
        return enumerate(self._kept, self._first)


class Inflow:
    """The receiving end: the number that is expected next."""

    def __init__(self) -> None:
        self.expected = 0

    def takes(self, number: int) -> bool:
        """Whether a packet is the next one, which it then was; others came before, or are sent again."""
        if number != self.expected:
            return False
        self.expected += 1
        return True
