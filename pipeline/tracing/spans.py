"""What a stage did when, while someone asks: slices of its exclusive time, and the moments frames left it.

Times are of the process's own `time.perf_counter()` until a tracer puts them on the clock of all stages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Work(NamedTuple):
    """What a section of a stage's time is for, as far as it can be told."""

    task: str = ""
    """compute: forward, backward, weights, loss or optimizer; encode, decode: the channel; wait: the channel, flush or
    norm."""
    pass_index: int | None = None
    """Which pass through the schedule, counted in its phase."""
    microbatch: int | None = None
    boundary: int | None = None


class Span(NamedTuple):
    """A slice of time that a stage spent on one thing only."""

    start: float
    end: float
    kind: str
    """compute, encode, decode or wait, whatever the wait is for."""
    task: str
    pass_index: int | None
    microbatch: int | None
    boundary: int | None


class Departure(NamedTuple):
    """A frame handed to the transport."""

    time: float
    channel: str
    pass_index: int | None
    microbatch: int | None
    boundary: int | None
    nbytes: int


@dataclass(frozen=True)
class Recording:
    """What one stage did, in the order it did it."""

    spans: list[Span] = field(default_factory=list)
    departures: list[Departure] = field(default_factory=list)
