"""Where a stage's time and bytes go, measured where they are spent.

Sections are exclusive: while `wait` runs inside `compute`, only `wait` advances, so the parts of a step add up to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

Section = Literal["compute", "encode", "wait", "decode"]
SECTIONS: tuple[Section, ...] = get_args(Section)


@dataclass
class Traffic:
    """What one end sent over one channel: frames, their bytes (headers included), and the tensors' own bytes."""

    frames: int = 0
    bytes: int = 0
    uncompressed: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.frames + other.frames, self.bytes + other.bytes, self.uncompressed + other.uncompressed)


@dataclass
class Meter:
    """Seconds of one stage by section, and its traffic by (boundary, channel, phase)."""

    seconds: dict[Section, float] = field(default_factory=lambda: dict.fromkeys(SECTIONS, 0.0))
    traffic: dict[tuple[int, str, str], Traffic] = field(default_factory=dict)
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

    def sent(self, boundary: int, channel: str, phase: str, frame_bytes: int, tensor_bytes: int) -> None:
        """Count one frame."""
        key = (boundary, channel, phase)
        self.traffic[key] = self.traffic.get(key, Traffic()) + Traffic(1, frame_bytes, tensor_bytes)
