"""The recording of a stage: spans of its time, and the times when frames left it. It is made only for a trace.

Times come from the process's own `time.perf_counter()`. A tracer converts them to one clock for all stages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Work(NamedTuple):
    """The purpose of a section of a stage's time. None in a field means that it does not apply."""

    task: str = ""
    """For compute: forward, backward, weights, loss or optimizer. For encode and decode: the channel. For wait: the
    channel, flush, norm, step, report or exchange."""
    pass_index: int | None = None
    """The pass through the schedule, counted in its phase."""
    microbatch: int | None = None
    boundary: int | None = None


class Span(NamedTuple):
    """A slice of time that a stage spent on one thing only, in seconds."""

    start: float
    end: float
    kind: str
    """compute, encode, decode or wait (for the wire or for a neighbour)."""
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
    """The spans and departures of one stage, in order of time."""

    spans: list[Span] = field(default_factory=list)
    departures: list[Departure] = field(default_factory=list)
