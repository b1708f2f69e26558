"""A trace: the work of a stage in some training steps, as objects and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from thinwire.pipeline.measuring.spans import Departure, Span

if TYPE_CHECKING:
    from thinwire.pipeline.measuring.clocks import Clock

TRACE_FORMAT = 1
_Record = TypeVar("_Record", Span, Departure)


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
                **vars(step),
                "spans": [span._asdict() for span in step.spans],
                "departures": [departure._asdict() for departure in step.departures],
            }
            for step in self.steps
        ]
        return {"format": TRACE_FORMAT, **vars(self), "steps": steps}

    @classmethod
    def from_json(cls, value: Any) -> StageTrace:
        """The trace from the result of `to_json`; ValueError if `value` is something else."""
        if not isinstance(value, Mapping) or value.get("format") != TRACE_FORMAT:
            raise ValueError(f"a stage's trace must have format {TRACE_FORMAT}")
        try:
            steps = tuple(
                StepTrace(
                    int(step["step"]),
                    float(step["start"]),
                    float(step["end"]),
                    tuple(_made(Span, span) for span in step["spans"]),
                    tuple(_made(Departure, departure) for departure in step["departures"]),
                )
                for step in value["steps"]
            )
            return cls(int(value["stage"]), float(value["clock_error"]), float(value["clock_drift"]), steps)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"a field of the trace is missing or has another type: {error}") from error


def _made(kind: type[_Record], values: Mapping[str, Any]) -> _Record:
    """A record from its fields by name. TypeError if one has another type, or a name is unknown."""
    made = kind(**values)
    for name, wanted in get_type_hints(kind).items():
        if not isinstance(getattr(made, name), (int | float) if wanted is float else wanted):
            raise TypeError(f"{name} is {values[name]!r}")
    return made
