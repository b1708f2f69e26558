import pytest

from thinwire.compress import parse
from thinwire.pipeline.errors import OptionsError, PipelineError
from thinwire.pipeline.options import (
    BoundaryOptions,
    CompressionOptions,
    OptimizerOptions,
    PipelineOptions,
    TrainingOptions,
    WireOptions,
)


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
            ["got 2 < 4; raise --pipeline.num_microbatches", "one entry a stage, got 2 for 4 stages"],
        ),
        (
            lambda: OptimizerOptions(lr=-1.0, weight_decay=float("nan")),
            ["optimizer.lr must be finite and not negative, got -1.0", "optimizer.weight_decay"],
        ),
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
