import json

import pytest

from thinwire.launch.trace import ExchangeSpan, exchanges, read_traces, transfers
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.measuring.spans import Departure, Span
from thinwire.pipeline.measuring.traces import StageTrace, StepTrace


def stage(index, spans=(), departures=()):
    return StageTrace(index, 0.0, 0.0, (StepTrace(4, 0.0, 9.0, tuple(spans), tuple(departures)),))


def sent(time, channel, microbatch, pass_index=4):
    return Departure(time, channel, pass_index, microbatch, 0, 64)


def waited(start, end, channel, microbatch, pass_index=4):
    return Span(start, end, "wait", channel, pass_index, microbatch, 0)


def test_a_frame_is_on_the_wire_from_its_sending_or_the_last_arrival_to_its_own():
    traces = [
        stage(
            0,
            [waited(4.0, 5.0, "gradients", 0), Span(8.0, 8.5, "wait", "flush", None, None, 0)],
            [sent(1.0, "activations", 0), sent(1.5, "activations", 1), sent(6.0, "activations", 2)],
        ),
        stage(
            1,
            [
                waited(0.0, 2.0, "activations", 0),
                waited(2.5, 3.0, "activations", 1),
                waited(7.0, 7.00001, "activations", 2),
            ],
            [sent(4.0, "gradients", 0), sent(8.0, "gradients", 1)],
        ),
    ]
    found = [
        (
            one.source,
            one.destination,
            one.departure.channel,
            one.departure.microbatch,
            one.departure.time,
            one.start,
            one.end,
        )
        for one in transfers(traces)
    ]
    assert found == [
        (0, 1, "activations", 0, 1.0, 1.0, 2.0),
        (0, 1, "activations", 1, 1.5, 2.0, 3.0),
        (0, 1, "activations", 2, 6.0, 6.0, 7.00001),
        (1, 0, "gradients", 0, 4.0, 4.0, 5.0),
    ]
    assert [frame.seen for frame in transfers(traces)] == [True, True, False, True]
    assert {(one.step, one.departure.nbytes, one.departure.boundary) for one in transfers(traces)} == {(4, 64, 0)}


def test_the_same_micro_batch_of_two_passes_is_two_frames():
    traces = [
        stage(0, departures=[sent(1.0, "activations", 0, 8), sent(3.0, "activations", 0, 9)]),
        stage(1, [waited(0.5, 2.0, "activations", 0, 8), waited(2.5, 4.0, "activations", 0, 9)]),
    ]
    found = [(one.departure.pass_index, one.start, one.end) for one in transfers(traces)]
    assert found == [(8, 1.0, 2.0), (9, 3.0, 4.0)]


def test_traces_are_read_in_stage_order(tmp_path):
    (tmp_path / "trace").mkdir()
    for index in (10, 2, 0):
        (tmp_path / "trace" / f"stage-{index}.json").write_text(json.dumps(stage(index).to_json()))
    assert [trace.stage for trace in read_traces(tmp_path)] == [0, 2, 10]


def test_every_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "stage-0.json").write_text("{")
    (tmp_path / "trace" / "stage-1.json").write_text("{}")
    (tmp_path / "trace" / "stage-2.json").write_text(json.dumps(stage(2).to_json()))
    with pytest.raises(OptionsError) as caught:
        read_traces(tmp_path)
    assert [mistake.split(" is no")[0] for mistake in caught.value.mistakes] == [
        str(tmp_path / "trace" / f"stage-{index}.json") for index in (0, 1)
    ]


def test_a_run_without_a_trace_is_told_how_to_have_one(tmp_path):
    with pytest.raises(OptionsError, match=r"has no trace; train with --trace"):
        read_traces(tmp_path)


def exchanged(start, end):
    """The spans of an exchange: parts are encoded first, sums decoded last."""
    return [
        Span(start, start + 0.1, "encode", "parts", 4, None, None),
        Span(end - 0.1, end, "decode", "sums", 4, None, None),
    ]


def backward(start, end):
    return Span(start, end, "compute", "backward", 4, 0, None)


def test_the_drain_hides_an_exchange_until_the_last_backward_of_the_pipeline():
    traces = [
        stage(0, [backward(1.0, 5.0), *exchanged(5.0, 6.0)]),
        stage(1, [backward(1.0, 2.0), *exchanged(2.0, 7.0)], [Departure(2.1, "parts", 4, None, None, 640)]),
        stage(2, [backward(0.0, 1.0), *exchanged(1.0, 3.0)]),
    ]
    assert exchanges(traces) == [
        ExchangeSpan(0, 4, 5.0, 6.0, 0.0, 0),
        ExchangeSpan(1, 4, 2.0, 7.0, 3.0, 640),
        ExchangeSpan(2, 4, 1.0, 3.0, 2.0, 0),
    ]
    assert transfers(traces) == []


def test_nothing_is_hidden_where_the_replicas_take_turns():
    """A simulation: replica 0 submits before the passes of replica 1."""
    turns = [backward(0.0, 1.0), *exchanged(1.0, 2.0), backward(2.0, 3.0), *exchanged(4.0, 5.0)]
    assert exchanges([stage(0, turns)]) == [ExchangeSpan(0, 4, 4.0, 5.0, 0.0, 0)]
