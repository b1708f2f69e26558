"""Both ends of a flow of packets from one process to another, over one connection after the other.

Packets are numbered from 0. The receiving end takes each packet once, in this order, and acknowledges the number that
it expects next. The sending end keeps packets that are not acknowledged. On a new connection, the receiving end says
which number it expects, and the sending end begins there. So each packet is taken exactly once and in order, as long as
both processes live, even if connections lose packets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Outflow(Generic[T]):
    """The sending end. It keeps packets that are not acknowledged."""

    def __init__(self) -> None:
        self._first = 0
        self._kept: deque[T] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, packet: T) -> int:
        """Keep a packet, and give its number."""
        self._kept.append(packet)
        return self._first + len(self._kept) - 1

    def acknowledge(self, expected: int) -> list[T] | None:
        """Remove the packets before number `expected`, and return them; None if this number was never sent."""
        if expected > self._first + len(self._kept):
            return None
        gone = [self._kept.popleft() for _ in range(expected - self._first)]
        self._first += len(gone)
        return gone

    def kept(self) -> Iterator[tuple[int, T]]:
        """The packets to send over a new connection, with their numbers."""
        return enumerate(self._kept, self._first)


class Inflow:
    """The receiving end. It knows the number that it expects next."""

    def __init__(self) -> None:
        self.expected = 0

    def takes(self, number: int) -> bool:
        """Whether a packet is the expected one. If it is, expect the next; an earlier one is a repeated one."""
        if number != self.expected:
            return False
        self.expected += 1
        return True
