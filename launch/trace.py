"""`thinwire trace RUN`: the recorded steps of a run in the Trace Event Format, for ui.perfetto.dev or chrome://tracing.

There, each stage is a process. It has a lane for its steps, a lane for its work (compute, encode, wait and decode do
not overlap), a lane for each direction of each of its boundaries, and a lane for the exchange with its replicas, with
the part that the drain of the pipeline hid. An arrow joins the encoding of a frame to its decoding.

A trace has three times for each frame: when the sender hands it to the transport, when the receiver begins to wait for
it, and when that wait ends. If the receiver did wait, the frame arrived when the wait ended. If it did not wait, the
frame was already there, and the end of the wait is only the latest time of its arrival. The frames of a channel arrive
one after another, so a frame is on the wire only after the frame before it has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.compress.stores.durable import write_for_user, write_own
from thinwire.compress.stores.marks import stray
from thinwire.errors.files import SIGNATURE, read_object, read_text
from thinwire.launch.recipe.yaml_text import load_yaml
from thinwire.launch.shared.arguments import Parser, run_folder, written
from thinwire.launch.shared.exit_codes import OK
from thinwire.launch.shared.strict_json import dumps
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.frames import EXCHANGE
from thinwire.pipeline.measuring.spans import Departure, Span
from thinwire.pipeline.measuring.traces import StageTrace, StepTrace

Event = dict[str, Any]

STEPS, STAGE = 0, 1
WIRE = {
    (way, channel): 2 + index
    for index, (way, channel) in enumerate(
        (way, channel) for channel in ("activations", "gradients") for way in ("out", "in")
    )
}
REPLICAS = 2 + len(WIRE)
LANES = {
    STEPS: "steps",
    STAGE: "stage",
    **{lane: f"wire, {channel} {way}" for (way, channel), lane in WIRE.items()},
    REPLICAS: "replicas",
}
_PASSES = ("forward", "backward", "weights")
"""The tasks of the passes."""
WAITED = 1e-4
"""Seconds. After a longer wait, a frame arrived when the wait ended; to receive a frame that is already there takes
microseconds."""


def main(argv: Sequence[str]) -> int:
    """Write the trace of a run, and return the exit status."""
    options = make_parser().parse_args(argv)
    traces = read_traces(run_folder(options.run))
    out = options.out or options.run / "trace.json"
    text = dumps(chrome_trace(traces))
    with written("--out", out):
        out.parent.mkdir(parents=True, exist_ok=True)
        (write_for_user if options.out else write_own)(out, text.encode())
    steps = ", ".join(str(step.step) for step in traces[0].steps)
    print(f"{out} has steps {steps} of {len(traces)} stages; open it at ui.perfetto.dev or chrome://tracing")
    return OK


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        prog="thinwire trace", description="Turn the steps that a run recorded with --trace into a trace for Perfetto."
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a run, such as runs/quickstart")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write (default: RUN/trace.json)")
    return parser


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


def chrome_trace(traces: Sequence[StageTrace]) -> dict[str, Any]:
    """The traces of all stages as one JSON object of the Trace Event Format; times in microseconds from the start."""
    zero = min((step.start for trace in traces for step in trace.steps), default=0.0)
    events = [event for trace in traces for event in _stage_events(trace, zero)]
    for index, transfer in enumerate(transfers(traces)):
        events += _transfer_events(index, transfer, zero)
    for exchange in exchanges(traces):
        events += _exchange_events(exchange, zero)
    clocks = {
        f"stage {trace.stage}": {"error_us": 1e6 * trace.clock_error, "drift_ppm": 1e6 * trace.clock_drift}
        for trace in traces
    }
    return {"generator": SIGNATURE, "traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clocks": clocks}}


def name_of(span: Span) -> str:
    """The name of a span, such as `forward 3` or `wait for gradients 0`."""
    verb = {"encode": "encode ", "decode": "decode ", "wait": "wait for "}.get(span.kind, "")
    number = "" if span.microbatch is None else f" {span.microbatch}"
    return f"{verb}{span.task or span.kind}{number}"


def _stage_events(trace: StageTrace, zero: float) -> list[Event]:
    stage = trace.stage
    named = [_metadata("process_name", stage, STEPS, name=f"stage {stage}")]
    named.append(_metadata("process_sort_index", stage, STEPS, sort_index=stage))
    for lane, name in LANES.items():
        named.append(_metadata("thread_name", stage, lane, name=name))
        named.append(_metadata("thread_sort_index", stage, lane, sort_index=lane))
    return named + [event for step in trace.steps for event in _step_events(stage, step, zero)]


def _step_events(stage: int, step: StepTrace, zero: float) -> list[Event]:
    whole = _complete(f"step {step.step}", "step", (stage, STEPS), step.start - zero, step.end - zero, step=step.step)
    return [whole] + [
        _complete(
            name_of(span),
            span.kind,
            (stage, STAGE),
            span.start - zero,
            span.end - zero,
            step=step.step,
            task=span.task,
            pass_index=span.pass_index,
            microbatch=span.microbatch,
            boundary=span.boundary,
        )
        for span in step.spans
    ]


def _transfer_events(index: int, transfer: Transfer, zero: float) -> list[Event]:
    frame = transfer.departure
    name, handed = f"{frame.channel} {frame.microbatch}", _microseconds(frame.time - zero)
    facts = {
        "step": transfer.step,
        "pass_index": frame.pass_index,
        "microbatch": frame.microbatch,
        "boundary": frame.boundary,
        "bytes": frame.nbytes,
        "handed_us": handed,
        "arrival": "seen" if transfer.seen else "at the end or before",
    }
    ends = {"out": transfer.source, "in": transfer.destination}
    wire = [
        _complete(name, "wire", (stage, WIRE[way, frame.channel]), transfer.start - zero, transfer.end - zero, **facts)
        for way, stage in ends.items()
    ]
    arrow = {"name": name, "cat": "frame", "id": index, "tid": STAGE}
    return [
        *wire,
        {**arrow, "ph": "s", "pid": transfer.source, "ts": handed},
        {**arrow, "ph": "f", "bp": "e", "pid": transfer.destination, "ts": _microseconds(transfer.decoding - zero)},
    ]


def _exchange_events(exchange: ExchangeSpan, zero: float) -> list[Event]:
    lane, start = (exchange.stage, REPLICAS), exchange.start - zero
    facts = {"step": exchange.step, "bytes": exchange.nbytes, "hidden_us": _microseconds(exchange.hidden)}
    whole = _complete("exchange", "replicas", lane, start, exchange.end - zero, **facts)
    hidden = _complete("hidden by the drain", "replicas", lane, start, start + exchange.hidden, step=exchange.step)
    return [whole, hidden] if exchange.hidden else [whole]


def _complete(name: str, kind: str, lane: tuple[int, int], start: float, end: float, **args: Any) -> Event:
    begun = _microseconds(start)
    duration = round(_microseconds(end) - begun, 3)
    given = {key: value for key, value in args.items() if value is not None}
    where = {"pid": lane[0], "tid": lane[1]}
    return {"name": name, "cat": kind, "ph": "X", **where, "ts": begun, "dur": duration, "args": given}


def _metadata(what: str, stage: int, lane: int, **args: Any) -> Event:
    return {"name": what, "ph": "M", "pid": stage, "tid": lane, "ts": 0, "args": args}


def _microseconds(seconds: float) -> float:
    """Seconds as microseconds, rounded to a nanosecond."""
    return round(1e6 * seconds, 3)
