"""A trace: the work of every stage in some training steps, with times on one clock.

A tracer belongs to a process and keeps only the newest steps, so a trace stays small in a long training.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from thinwire.pipeline.meters import Meter
from thinwire.pipeline.tracing.clocks import Clock, Reading, read_clock
from thinwire.pipeline.tracing.spans import Departure, Recording, Span

TRACE_FORMAT = 1


@dataclass(frozen=True)
class StepTrace:
    """One training step of one stage."""

    step: int
    start: float
    end: float
    spans: tuple[Span, ...]
    departures: tuple[Departure, ...]

    def on(self, clock: Clock) -> StepTrace:
        """The same step, with times of the reference's clock."""
        at = clock.reference
        return StepTrace(
            self.step,
            at(self.start),
            at(self.end),
            tuple(span._replace(start=at(span.start), end=at(span.end)) for span in self.spans),
            tuple(departure._replace(time=at(departure.time)) for departure in self.departures),
        )


@dataclass(frozen=True)
class StageTrace:
    """The kept steps of one stage. Times are in seconds, by the clock of the process with the last stage."""

    stage: int
    clock_error: float
    """The most that a time can be wrong, in seconds."""
    clock_drift: float
    """The drift of this process's clock against the other, in seconds per second. The times are corrected for it."""
    steps: tuple[StepTrace, ...]

    def to_json(self) -> dict[str, Any]:
        """The trace as JSON values."""
        steps = [
            {
                "step": step.step,
                "start": step.start,
                "end": step.end,
                "spans": [span._asdict() for span in step.spans],
                "departures": [departure._asdict() for departure in step.departures],
            }
            for step in self.steps
        ]
        return {
            "format": TRACE_FORMAT,
            "stage": self.stage,
            "clock_error": self.clock_error,
            "clock_drift": self.clock_drift,
            "steps": steps,
        }

    @classmethod
    def from_json(cls, value: Any) -> StageTrace:
        """The trace from the result of `to_json`; ValueError if `value` is something else."""
        if not isinstance(value, Mapping) or value.get("format") != TRACE_FORMAT:
            raise ValueError(f"a stage's trace must have format {TRACE_FORMAT}")
        try:
            return cls(
                value["stage"],
                value["clock_error"],
                value["clock_drift"],
                tuple(
                    StepTrace(
                        step["step"],
                        step["start"],
                        step["end"],
                        tuple(Span(**span) for span in step["spans"]),
                        tuple(Departure(**departure) for departure in step["departures"]),
                    )
                    for step in value["steps"]
                ),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"a field of the trace is missing or has another type: {error}") from error


class Tracer:
    """Keeps the newest training steps of one process's stages.

    Args:
        meters: the meter of every stage of this process, by stage.
        keep: number of steps to keep; 0 records nothing and takes no time.
    """

    def __init__(self, meters: Mapping[int, Meter], keep: int) -> None:
        self.keep = keep
        self._meters = dict(meters)
        self._kept: deque[dict[int, StepTrace]] = deque(maxlen=keep)
        self._readings: list[Reading] = []

    def read_clock(self, reference: int) -> None:
        """Compare clocks with the reference process, if steps are kept; collective, before and after training."""
        if self.keep:
            self._readings.append(read_clock(reference))

    @contextmanager
    def step(self, index: int) -> Iterator[None]:
        """Record the training step inside."""
        if not self.keep:
            yield
            return
        started = time.perf_counter()
        recordings = {stage: Recording() for stage in self._meters}
        for stage, meter in self._meters.items():
            meter.recording = recordings[stage]
        try:
            yield
        finally:
            for meter in self._meters.values():
                meter.recording = None
        ended = time.perf_counter()
        self._kept.append(
            {
                stage: StepTrace(index, started, ended, tuple(recording.spans), tuple(recording.departures))
                for stage, recording in recordings.items()
            }
        )

    def traces(self) -> dict[int, StageTrace]:
        """The kept steps of each stage, on the reference's clock. It needs a reading before training and one after."""
        clock = Clock(self._readings[0], self._readings[-1])
        return {
            stage: StageTrace(
                stage, clock.error, clock.drift, tuple(step[stage].on(clock) for step in self._kept if stage in step)
            )
            for stage in self._meters
        }
