"""Where a stage's time and bytes go, measured where they are spent.

Sections are exclusive: while `wait` runs inside `compute`, only `wait` advances, so the parts of a step add up to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from typing import Literal, get_args

Section = Literal["compute", "encode", "wait", "decode"]
SECTIONS: tuple[Section, ...] = get_args(Section)


Route = tuple[int, str, str]
"""Boundary, channel, phase."""


@dataclass(frozen=True)
class Traffic:
    """What crossed one channel."""

    frames: int = 0
    bytes: int = 0
    """Bytes of the frames, headers included."""
    uncompressed: int = 0
    """Bytes of the tensors as they are."""
    elements: int = 0
    """Elements of the tensors that go through the method."""
    rows: int = 0
    """Rows of those tensors."""
    full_rows: int = 0
    """Rows that went in full: warm-up, first visits, evaluation with compression off."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def bits_per_element(self) -> float:
        """Bits on the wire for each element, everything counted; 0 where there is none."""
        return 8 * self.bytes / self.elements if self.elements else 0.0


@dataclass
class Meter:
    """Seconds of one stage by section, and what it sent and received by (boundary, channel, phase)."""

    seconds: dict[Section, float] = field(default_factory=lambda: dict.fromkeys(SECTIONS, 0.0))
    sent: dict[Route, Traffic] = field(default_factory=dict)
    received: dict[Route, Traffic] = field(default_factory=dict)
    _open: list[tuple[Section, str]] = field(default_factory=list)
    _since: float = 0.0

    @contextmanager
    def section(self, name: Section, what: str = "") -> Iterator[None]:
        """Charge the time inside to `name`, and to nothing that surrounds it; `what` says it in words."""
        self._turn()
        self._open.append((name, what))
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1][0]] += now - self._since
        self._since = now

    @property
    def doing(self) -> str:
        """The innermost open section in words; empty when nothing is under way. Readable from another thread."""
        inside = self._open[-1:]
        return inside[0][1] or inside[0][0] if inside else ""

    @property
    def total(self) -> Traffic:
        """Everything sent and received."""
        return sum([*self.sent.values(), *self.received.values()], Traffic())


def count(into: dict[Route, Traffic], route: Route, traffic: Traffic) -> None:
    """Add traffic to what a route has carried."""
    into[route] = into.get(route, Traffic()) + traffic
