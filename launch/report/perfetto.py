"""`thinwire trace RUN`: the recorded steps of a run in the Trace Event Format, for ui.perfetto.dev or chrome://tracing.

There, each stage is a process. It has a lane for its steps, a lane for its work (compute, encode, wait and decode do
not overlap), a lane for each direction of each of its boundaries, and a lane for the exchange with its replicas, with
the part that the drain of the pipeline hid. An arrow joins the encoding of a frame to its decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from thinwire.compress.stores.durable import write_for_user, write_own
from thinwire.errors.files import SIGNATURE
from thinwire.launch.report.timeline import ExchangeSpan, Transfer, exchanges, read_traces, transfers
from thinwire.launch.shared.arguments import Parser, run_folder
from thinwire.launch.shared.exit_codes import OK
from thinwire.launch.shared.strict_json import dumps
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.measuring.spans import Span
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


def main(argv: Sequence[str]) -> int:
    """Write the trace of a run, and return the exit status."""
    options = make_parser().parse_args(argv)
    traces = read_traces(run_folder(options.run))
    out = options.out or options.run / "trace.json"
    write(out, dumps(chrome_trace(traces)), write_for_user if options.out else write_own)
    steps = ", ".join(str(step.step) for step in traces[0].steps)
    print(f"{out} has steps {steps} of {len(traces)} stages; open it at ui.perfetto.dev or chrome://tracing")
    return OK


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        prog="thinwire trace",
        description="Turn the steps that a run recorded with --trace into a trace for Perfetto.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a run, such as runs/quickstart")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write (default: RUN/trace.json)")
    return parser


def write(path: Path, text: str, how: Callable[[Path, bytes], None] = write_for_user) -> None:
    """Write a file. OptionsError if the file cannot be written, or is there and not one of ours."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        how(path, text.encode())
    except OSError as error:
        raise OptionsError(f"--out must name a file that can be written, got {path}: {error.strerror}") from error


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
