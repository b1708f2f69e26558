"""The traces of all stages of a run, put together: the steps on one clock, and the way of every frame over the wire.

A trace has three times for each frame: when the sender hands it to the transport, when the receiver begins to wait for
it, and when that wait ends. If the receiver did wait, the frame arrived when the wait ended. If it did not wait, the
frame was already there, and the end of the wait is only the latest time of its arrival. The frames of a channel arrive
one after another, so a frame is on the wire only after the frame before it has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from thinwire.compress.stores.marks import stray
from thinwire.errors.files import read_object, read_text
from thinwire.launch.run.yaml_text import load_yaml
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.frames import EXCHANGE
from thinwire.pipeline.measuring.spans import Departure
from thinwire.pipeline.measuring.traces import StageTrace

_PASSES = ("forward", "backward", "weights")
"""The tasks of the passes."""
WAITED = 1e-4
"""Seconds. After a longer wait, a frame arrived when the wait ended; to receive a frame that is already there takes
microseconds."""


@dataclass(frozen=True)
class Transfer:
    """One frame on its way from one stage to another; times are in seconds of the common clock."""

    source: int
    destination: int
    step: int
    departure: Departure
    """As the sender handed it to the transport."""
    start: float
    """When it had the wire for itself: at its departure, or the arrival of the frame before it, if that was later."""
    end: float
    """When the wait of the receiver ended."""
    decoding: float
    """When the receiver began to decode it."""
    seen: bool
    """Whether the receiver was waiting when the frame arrived. If not, it arrived at `end` or before."""


@dataclass(frozen=True)
class ExchangeSpan:
    """One exchange of a stage with its replicas; times are in seconds of the common clock."""

    stage: int
    step: int
    start: float
    end: float
    hidden: float
    """Seconds of it before the last backward of the pipeline ended: the drain hid them."""
    nbytes: int
    """Bytes of the frames that the stage made; each may go to several replicas."""


def read_traces(run: Path) -> list[StageTrace]:
    """The traces of all stages of a run, in stage order. OptionsError names every file that cannot be read."""
    if (said := stray(run / "trace")) is not None:
        raise OptionsError(f"{run} must be the folder of a run, but {said}")
    paths = sorted(run.glob("trace/stage-*.json"), key=lambda path: (len(path.name), path.name))
    if not paths:
        raise OptionsError(f"{run} has no trace; train with --trace to record the last steps")
    traces, mistakes = [], _absent(run)
    for path in paths:
        try:
            traces.append(StageTrace.from_json(read_object(path)))
        except (OSError, ValueError) as error:
            mistakes.append(f"{path} is not the trace of a stage: {error}")
    if mistakes:
        raise OptionsError(mistakes)
    return traces


def _absent(run: Path) -> list[str]:
    """A sentence for each stage of the recipe that has no trace. Empty if the folder has no recipe."""
    recipe = run / "recipe.yaml"
    if not recipe.is_file():
        return []
    try:
        count = int(load_yaml(read_text(recipe), str(recipe))["pipeline"]["num_stages"])
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return [f"{recipe} must be the recipe of a run, and has no pipeline.num_stages"]
    files = [run / f"trace/stage-{stage}.json" for stage in range(count)]
    return [f"{path} is missing; the run has {count} stages" for path in files if not path.is_file()]


def transfers(traces: Sequence[StageTrace]) -> list[Transfer]:
    """Every frame that both its stages traced, channel by channel, in the order of sending."""
    spans = [(trace.stage, span) for trace in traces for step in trace.steps for span in step.spans]
    # by the identity of a frame: its channel, pass, micro-batch and boundary
    decoded = {span[3:]: span.start for _, span in spans if span.kind == "decode"}
    waits = {span[3:]: (stage, span) for stage, span in spans if span.kind == "wait" and span.microbatch is not None}
    sent = [
        (trace.stage, step.step, departure)
        for trace in traces
        for step in trace.steps
        for departure in step.departures
        if departure[1:5] in waits
    ]
    sent.sort(key=lambda frame: (frame[2].boundary, frame[2].channel, frame[2].time))
    found, arrived = list[Transfer](), dict[tuple[int | None, str], float]()
    for source, step, departure in sent:
        (destination, wait), channel = waits[departure[1:5]], (departure.boundary, departure.channel)
        start = min(max(departure.time, arrived.get(channel, departure.time)), wait.end)
        arrived[channel] = wait.end
        decoding, seen = decoded.get(departure[1:5], wait.end), wait.end - wait.start > WAITED
        found.append(Transfer(source, destination, step, departure, start, wait.end, decoding, seen))
    return found


def exchanges(traces: Sequence[StageTrace]) -> list[ExchangeSpan]:
    """The exchanges between replicas that the stages traced, step by step; empty without replicas."""
    found: list[ExchangeSpan] = []
    drained: dict[int, float] = {}
    for trace in traces:
        for step in trace.steps:
            computed = max((span.end for span in step.spans if span.task in _PASSES), default=step.start)
            drained[step.step] = max(computed, drained.get(step.step, computed))
            # in a simulation, other replicas have their passes between the frames of the first
            inside = [span for span in step.spans if span.task in EXCHANGE and span.start >= computed]
            if inside:
                nbytes = sum(frame.nbytes for frame in step.departures if frame.channel in EXCHANGE)
                start, end = inside[0].start, inside[-1].end
                found.append(ExchangeSpan(trace.stage, step.step, start, end, 0.0, nbytes))
    return [replace(one, hidden=max(0.0, min(one.end, drained[one.step]) - one.start)) for one in found]
