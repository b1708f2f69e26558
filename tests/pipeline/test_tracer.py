import json

import pytest

from thinwire.pipeline.measuring.meters import Meter
from thinwire.pipeline.measuring.spans import Departure, Span, Work
from thinwire.pipeline.measuring.tracer import Tracer
from thinwire.pipeline.measuring.traces import StageTrace, StepTrace

STEP = StepTrace(
    7,
    1.0,
    2.0,
    (Span(1.25, 1.5, "compute", "forward", 7, 0, None), Span(1.5, 1.75, "wait", "gradients", 7, 0, 3)),
    (Departure(1.5, "activations", 7, 0, 3, 128),),
)
TRACE = StageTrace(3, 1e-5, -2e-6, (STEP,))


def step(tracer, meter, index):
    with tracer.step(index), meter.section("compute", work=Work("forward", index, 0)):
        meter.depart(Work("activations", index, 0, 0), 10)


def test_the_newest_steps_are_kept(alone):
    meter = Meter()
    tracer = Tracer({2: meter}, keep=2)
    tracer.read_clock(0)
    for index in range(5):
        step(tracer, meter, index)
        with meter.section("encode"):
            pass  # between the steps nothing is recorded
    tracer.read_clock(0)
    trace = tracer.traces()[2]
    assert [kept.step for kept in trace.steps] == [3, 4]
    for kept in trace.steps:
        ((span,), (departure,)) = kept.spans, kept.departures
        assert (span.kind, span.task, span.pass_index) == ("compute", "forward", kept.step)
        assert kept.start <= span.start <= departure.time <= span.end <= kept.end
    assert meter.recording is None


def test_a_tracer_that_keeps_nothing_records_nothing():
    meter = Meter()
    tracer = Tracer({0: meter}, keep=0)
    tracer.read_clock(0)  # would need a process group otherwise
    with tracer.step(0):
        assert meter.recording is None


def test_a_step_that_fails_is_not_kept_and_recording_ends(alone):
    meter = Meter()
    tracer = Tracer({0: meter}, keep=2)
    tracer.read_clock(0)
    with pytest.raises(KeyError), tracer.step(0):
        raise KeyError
    assert meter.recording is None
    assert tracer.traces()[0].steps == ()


def test_a_trace_comes_back_from_its_json():
    assert StageTrace.from_json(json.loads(json.dumps(TRACE.to_json()))) == TRACE


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda value: [], "must have format 1"),
        (lambda value: {**value, "format": 2}, "must have format 1"),
        (lambda value: {key: part for key, part in value.items() if key != "steps"}, "steps"),
        (lambda value: {**value, "steps": [3]}, "another type"),
        (lambda value: {**value, "clock_drift": []}, "another type"),
        (lambda value: {**value, "steps": [{**value["steps"][0], "start": "x"}]}, "another type"),
        (lambda value: {**value, "steps": [{**value["steps"][0], "spans": [dict.fromkeys(Span._fields)]}]}, "another"),
        (lambda value: {**value, "steps": [{**value["steps"][0], "spans": [{"begin": 1}]}]}, "begin"),
    ],
)
def test_what_is_no_trace_is_said(change, said):
    with pytest.raises(ValueError, match=said):
        StageTrace.from_json(change(TRACE.to_json()))
