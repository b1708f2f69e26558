import inspect

import pytest

from thinwire.compress import parse
from thinwire.pipeline.errors import OptionsError, PipelineError
from thinwire.pipeline.options import (
    BoundaryOptions,
    CompressionOptions,
    OptimizerOptions,
    PipelineOptions,
    SyncOptions,
    TrainingOptions,
    WireOptions,
)
from thinwire.pipeline.schedules import SCHEDULES


def test_an_override_replaces_one_channel_of_one_boundary():
    options = CompressionOptions(
        activations="q(4)", gradients="q(8)", boundaries={1: BoundaryOptions(activations="q(2)"), 2: BoundaryOptions()}
    )
    codecs = {(b, c): options.method(b, c) for b in range(3) for c in ("activations", "gradients")}
    assert codecs == {
        (0, "activations"): parse("q(4)"),
        (0, "gradients"): parse("q(8)"),
        (1, "activations"): parse("q(2)"),
        (1, "gradients"): parse("q(8)"),
        (2, "activations"): parse("q(4)"),
        (2, "gradients"): parse("q(8)"),
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"transport": "quic"}, "wire.transport must be gloo or zmq or nccl or auto, got 'quic'"),
        ({"nonfinite": "rais"}, "wire.nonfinite must be raise or send, got 'rais'"),
    ],
)
def test_a_word_that_does_not_exist_is_told_in_a_loop_of_ones_own(options, said):
    """A recipe's reader knows the words; here the one was a KeyError, and the other let NaN through."""
    with pytest.raises(OptionsError) as caught:
        WireOptions(**options)
    assert list(caught.value.mistakes) == [said]


def test_an_expression_is_read_once(monkeypatch):
    """Read once a boundary, it was most of what a prediction of a thousand stages took."""
    read = []
    monkeypatch.setattr("thinwire.compress.parse", lambda expression: read.append(expression) or parse(expression))
    compression = CompressionOptions(
        activations="q(4)", gradients="q(8)", boundaries={1: BoundaryOptions(activations="q(2)")}, shared="ef(q(8))"
    )
    for _ in range(2):
        assert compression.methods(4, "activations") == [parse("q(4)"), parse("q(2)"), parse("q(4)"), parse("q(4)")]
        assert compression.method_of_shared == parse("ef(q(8))")
    assert sorted(read) == ["ef(q(8))", "q(2)", "q(4)", "q(8)"]


def test_all_bad_expressions_are_told_at_once_and_where():
    with pytest.raises(OptionsError) as caught:
        CompressionOptions(activations="q(9)", gradients="zip", boundaries={0: BoundaryOptions(gradients="q(")})
    first, second, third = caught.value.mistakes
    assert first.startswith("compression.activations: ")
    assert second.startswith("compression.gradients: ")
    assert "none" in second
    assert third.startswith("compression.boundaries.0.gradients: ")
    assert isinstance(caught.value, PipelineError)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"activations": "none", "gradients": "reuse"}, "compression"),
        ({"activations": "ef(q(4))", "gradients": " reuse"}, "compression"),
        (
            {"activations": "topk(0.1)", "gradients": "reuse", "boundaries": {1: BoundaryOptions(activations="q(4)")}},
            "compression.boundaries.1",
        ),
    ],
)
def test_reuse_without_positions_is_told_before_anything_starts(fields, place):
    with pytest.raises(OptionsError) as caught:
        CompressionOptions(**fields)
    (mistake,) = caught.value.mistakes
    assert mistake.startswith(f"{place}.gradients: reuse needs topk or randk on the activations of the same boundary")


def test_reuse_goes_with_positions_inside_feedback():
    CompressionOptions(activations="aqsgd(topk(0.1))", gradients="reuse")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: WireOptions(timeout=0), ["wire.timeout must be from 0.01 to 1e6 seconds, got 0"]),
        (
            lambda: PipelineOptions(num_stages=0, num_microbatches=-1, microbatch_size=0, accumulation=0),
            [
                "pipeline.num_stages must be at least 1, got 0",
                "pipeline.num_microbatches must be at least 1, got -1",
                "pipeline.microbatch_size must be at least 1, got 0",
                "pipeline.accumulation must be at least 1, got 0",
            ],
        ),
        (
            lambda: PipelineOptions(num_stages=4, schedule="1f1b", num_microbatches=2, layers=[3, 3]),
            ["got 2 < 4; raise --pipeline.num_microbatches", "a number for each stage, got 2 for 4 stages"],
        ),
        (
            lambda: OptimizerOptions(lr=-1.0, weight_decay=float("nan")),
            ["optimizer.lr must be finite and not negative, got -1.0", "optimizer.weight_decay"],
        ),
        (lambda: OptimizerOptions(lr=1e38), ["optimizer.lr must be at most 1e+30, got 1e+38"]),
        (lambda: SyncOptions(every=2, lr=1e39), ["replicas.sync.lr must be above 0 and at most 1e+30, got 1e+39"]),
        (
            lambda: TrainingOptions(steps=-1, threads=0),
            ["training.steps must be at least 0, got -1", "training.threads must be at least 1, got 0"],
        ),
    ],
)
def test_all_mistakes_of_a_group_are_told_at_once(make, said):
    with pytest.raises(OptionsError) as caught:
        make()
    assert len(caught.value.mistakes) == len(said)
    for mistake, part in zip(caught.value.mistakes, said, strict=True):
        assert part in mistake


@pytest.mark.parametrize(
    ("schedule", "num_stages", "processes"),
    [("gpipe", 4, 4), ("1f1b", 4, 4), ("interleaved-1f1b", 4, 2), ("zbv-zero-bubble", 8, 4), ("gpipe", 1, 1)],
)
def test_the_schedule_says_how_many_processes_there_are(schedule, num_stages, processes):
    assert PipelineOptions(schedule=schedule, num_stages=num_stages).num_processes == processes


def test_a_batch_is_all_micro_batches_of_all_passes():
    assert PipelineOptions(num_microbatches=3, microbatch_size=5, accumulation=2).batch_size == 30


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("2f2b", "pipeline.schedule must be one of gpipe, 1f1b, 1f1b-wan, looped-bfs, "),
        ("no_schedules.eager", "pipeline.schedule must be one of gpipe, 1f1b, 1f1b-wan, looped-bfs, "),
        (
            "no_schedules:eager",
            "pipeline.schedule: module no_schedules of 'no_schedules:eager' cannot be",
        ),
        ("math:eager", "pipeline.schedule: module math has no 'eager'"),
        ("math:pi", "pipeline.schedule math:pi must be a ScheduleSpec, got float"),
    ],
)
def test_a_schedule_that_is_none_is_one_sentence_beside_other_mistakes(schedule, said):
    with pytest.raises(OptionsError) as error:
        PipelineOptions(schedule=schedule, num_microbatches=0)
    first, second = error.value.mistakes
    assert first == "pipeline.num_microbatches must be at least 1, got 0"
    assert second.startswith(said)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("1f1", "or module:name for your own, got 1f1 (did you mean 1f1b?)"),
        (
            "numpy.eager",
            "or module:name for your own, got numpy.eager (did you mean numpy:eager?)",
        ),
    ],
)
def test_a_misspelt_schedule_is_answered_with_its_name(schedule, said):
    with pytest.raises(OptionsError) as error:
        PipelineOptions(schedule=schedule)
    assert str(error.value).endswith(said)


def test_a_mistake_in_both_codecs_is_told_once():
    """`--codec zip` is for both channels, and its mistake was printed twice."""
    with pytest.raises(OptionsError) as error:
        CompressionOptions(activations="q(9)", gradients="q(9)", boundaries={1: BoundaryOptions(gradients="q(0)")})
    assert error.value.mistakes == (
        "compression.activations and compression.gradients: q's bits must be an integer from 1 to 8, got 9",
        "compression.boundaries.1.gradients: q's bits must be an integer from 1 to 8, got 0",
    )


def test_the_help_of_the_schedule_names_them_all():
    source = inspect.getsource(PipelineOptions)
    assert [name for name in SCHEDULES if name not in source] == []
