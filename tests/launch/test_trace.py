"""Traces of real processes, read back as Perfetto would."""

import json
import math
from collections import Counter
from itertools import pairwise

import pytest

from support import processes, toy
from thinwire.launch import cli
from thinwire.launch.results.outputs import save_traces
from thinwire.launch.trace import LANES, STAGE, STEPS, chrome_trace, transfers
from thinwire.pipeline.measuring.meters import WAITS

pytestmark = pytest.mark.processes

STAGES, MICROBATCHES, PASSES, KEPT = 2, 4, 2, (2, 3)
NANOSECOND = 2e-3  # in microseconds, the unit of the format: two roundings


def _train(rank):
    """Four steps of two passes each, the last two traced: (stage -> trace, step -> seconds by section)."""
    trainer = toy.make_trainer(rank, schedule="1f1b", steps=4, accumulation=PASSES, trace=len(KEPT))
    trainer.asked = lambda: False
    sections = {}
    trainer.train(lambda record: sections.update({record.step: record.sections}))
    return trainer.tracer.traces(), sections


@pytest.fixture(scope="module")
def results():
    """What each process returned."""
    return processes.run(_train, STAGES)


@pytest.fixture(scope="module")
def traces(results):
    return [found[stage] for stage, (found, _) in enumerate(results)]


@pytest.fixture(scope="module")
def chrome(traces):
    return json.loads(json.dumps(chrome_trace(traces), allow_nan=False))


def complete(chrome, lane=None):
    """Complete events, of one lane or all."""
    return [event for event in chrome["traceEvents"] if event["ph"] == "X" and lane in (None, event["tid"])]


def end(event):
    return event["ts"] + event["dur"]


def test_every_event_is_of_the_trace_event_format(chrome):
    assert chrome["displayTimeUnit"] == "ms"
    fields = {
        "X": {"ts", "dur", "cat", "args"},
        "M": {"args"},
        "s": {"id", "ts", "cat"},
        "f": {"id", "ts", "cat", "bp"},
    }
    for event in chrome["traceEvents"]:
        assert {"name", "pid", "tid"} | fields[event["ph"]] <= set(event), event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ts"] >= 0 and event.get("dur", 0) >= 0
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in chrome["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert named == {(stage, lane): name for stage in range(STAGES) for lane, name in LANES.items()}


def test_every_span_lies_inside_its_step(chrome):
    steps = {(event["pid"], event["args"]["step"]): event for event in complete(chrome, STEPS)}
    assert set(steps) == {(stage, step) for stage in range(STAGES) for step in KEPT}
    spans = complete(chrome, STAGE)
    for span in spans:
        step = steps[span["pid"], span["args"]["step"]]
        assert step["ts"] - NANOSECOND <= span["ts"] and end(span) <= end(step) + NANOSECOND, (span, step)
    assert {span["cat"] for span in spans} == {"compute", "encode", "wait", "decode"}


def test_no_two_events_of_a_lane_overlap(chrome):
    for stage in range(STAGES):
        for lane in LANES:
            events = [event for event in complete(chrome, lane) if event["pid"] == stage]
            for earlier, later in pairwise(sorted(events, key=lambda event: (event["ts"], end(event)))):
                assert end(earlier) <= later["ts"] + NANOSECOND, (earlier, later)


def test_spans_add_up_to_the_meters(chrome, results):
    for stage, (_, sections) in enumerate(results):
        for step in KEPT:
            kinds = Counter()
            for section, seconds in sections[step].items():
                kinds["wait" if section in WAITS else section] += seconds
            for section, seconds in kinds.items():
                spans = [
                    event["dur"]
                    for event in complete(chrome, STAGE)
                    if (event["pid"], event["args"]["step"], event["cat"]) == (stage, step, section)
                ]
                allowed = 1e-6 * NANOSECOND * len(spans)
                assert math.fsum(spans) / 1e6 == pytest.approx(seconds, rel=0, abs=allowed), (stage, step, section)


def test_every_span_says_what_it_is_for(traces):
    spans = [span for trace in traces for step in trace.steps for span in step.spans]
    waits = {"activations", "gradients", "flush", "norm", "step", "report"}
    assert {span.task for span in spans if span.kind == "wait"} <= waits
    assert all(span.task for span in spans)
    assert {span.task for span in traces[0].steps[0].spans} >= {"step"}
    assert {span.task for span in traces[-1].steps[0].spans} >= {"step", "report"}


def test_every_forward_and_backward_of_every_micro_batch_is_there(chrome):
    for stage in range(STAGES):
        for task in ("forward", "backward"):
            done = {
                (event["args"]["step"], event["args"]["pass_index"], event["args"]["microbatch"])
                for event in complete(chrome, STAGE)
                if event["pid"] == stage and event["args"].get("task") == task
            }
            expected = {
                (step, PASSES * step + index, microbatch)
                for step in KEPT
                for index in range(PASSES)
                for microbatch in range(MICROBATCHES)
            }
            assert done == expected


def test_no_frame_arrives_before_it_was_sent(traces):
    """On the one clock, to the error that the clocks state."""
    frames = transfers(traces)
    assert len(frames) == len(KEPT) * PASSES * MICROBATCHES * len(("activations", "gradients"))
    error = max(trace.clock_error for trace in traces)
    for frame in frames:
        assert frame.end >= frame.departure.time - error, frame
        assert frame.departure.nbytes > 64
    assert {(frame.departure.channel, frame.source, frame.destination) for frame in frames} == {
        ("activations", 0, 1),
        ("gradients", 1, 0),
    }


def test_arrows_lead_from_encoding_to_decoding(chrome):
    arrows = {kind: {event["id"]: event for event in chrome["traceEvents"] if event["ph"] == kind} for kind in "sf"}
    assert set(arrows["s"]) == set(arrows["f"]) and arrows["s"]
    for kind, section in (("s", "encode"), ("f", "decode")):
        for arrow in arrows[kind].values():
            around = [
                (event["cat"], event["name"])
                for event in complete(chrome, STAGE)
                if event["pid"] == arrow["pid"] and event["ts"] - NANOSECOND <= arrow["ts"] <= end(event) + NANOSECOND
            ]
            assert (section, f"{section} {arrow['name']}") in around, (arrow, around)


def test_the_command_writes_what_a_run_recorded(traces, tmp_path, capsys):
    save_traces(tmp_path, traces)
    assert cli.main(["trace", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert f"{tmp_path / 'trace.json'} has steps 2, 3 of 2 stages" in said.out
    written = json.loads((tmp_path / "trace.json").read_text())
    assert written == json.loads(json.dumps(chrome_trace(traces)))


def test_a_newer_run_without_a_trace_removes_the_old_one(traces, tmp_path):
    save_traces(tmp_path, traces)
    save_traces(tmp_path, [])
    assert not (tmp_path / "trace").exists()


def test_a_stage_without_a_trace_is_named(traces, tmp_path, capsys):
    """A run of two stages whose second file was gone had "steps of 1 stages"."""
    save_traces(tmp_path, traces)
    (tmp_path / "recipe.yaml").write_text(f"pipeline: {{num_stages: {len(traces) + 1}}}")
    assert cli.main(["trace", str(tmp_path)]) == 2
    said = f"{tmp_path}/trace/stage-{len(traces)}.json is missing; the run has {len(traces) + 1} stages\n"
    assert capsys.readouterr().err == said


def test_what_cannot_be_read_or_written_has_status_2(traces, tmp_path, capsys):
    (tmp_path / "nothing").mkdir()
    assert cli.main(["trace", str(tmp_path / "nothing")]) == 2
    assert "has no trace" in capsys.readouterr().err
    save_traces(tmp_path, traces)
    (tmp_path / "file").touch()
    assert cli.main(["trace", str(tmp_path), "--out", str(tmp_path / "file" / "trace.json")]) == 2
    assert "--out must name a file that can be written" in capsys.readouterr().err
