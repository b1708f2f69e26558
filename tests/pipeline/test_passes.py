"""Which pass comes: said by whoever drives the schedule, or taken as plain training and evaluation."""

import pytest
import torch
from torch import nn

from thinwire.compress import CodecError
from thinwire.pipeline import CompressedStage, CompressionOptions, Pass, SlotCounts, Wire
from thinwire.pipeline.errors import PipelineError
from thinwire.pipeline.schedules import actions, build_merged, merge
from thinwire.pipeline.wire.passes import phase_of

WIDTH, COUNT, ROWS = 6, 4, 2


def pipeline(activations="q(4)", **options):
    """Two stages in this process, as a user builds them, and their schedule."""
    wire = Wire(CompressionOptions(activations=activations, gradients="q(8)"), **options)
    example = torch.empty(ROWS, WIDTH)
    stages = [
        CompressedStage(nn.Linear(WIDTH, WIDTH), index, 2, torch.device("cpu"), example, example, wire=wire)
        for index in range(2)
    ]
    return stages, build_merged(merge(actions("gpipe", 2, 2, COUNT)), stages, COUNT, nn.functional.mse_loss)


def run(act):
    generator = torch.Generator().manual_seed(0)
    act(*(torch.randn(COUNT * ROWS, WIDTH, generator=generator),), target=torch.zeros(COUNT * ROWS, WIDTH))


def sent(stages):
    """Frames by phase, and rows in full, of the activations."""
    return {key[2]: (traffic.frames, traffic.full_rows) for key, traffic in stages[0].meter.sent.items()}


def announce(stages, coming):
    for stage in stages:
        stage.begin(coming)


@pytest.mark.parametrize(
    ("coming", "positions"),
    [(Pass(), [(0, 2), (2, 4), (4, 6)]), (Pass(accumulation=2), [(12, 14), (14, 16), (16, 18)])],
)
def test_rows_are_numbered_through_all_passes_of_a_batch(coming, positions):
    found = coming.microbatches(step=7, count=3, rows=2)
    assert [(one.positions.start, one.positions.stop) for one in found] == positions
    assert [(one.step, one.index, one.sample_ids) for one in found] == [(7, index, None) for index in range(3)]


def test_each_micro_batch_has_its_own_samples():
    found = Pass(sample_ids=torch.tensor([5, 3, 9, 1])).microbatches(step=0, count=2, rows=2)
    assert [one.sample_ids.tolist() for one in found] == [[5, 3], [9, 1]]


def test_a_micro_batch_is_as_long_as_its_longest_sample():
    found = Pass(lengths=torch.tensor([5, 3, 2, 9])).microbatches(step=0, count=2, rows=2)
    assert [one.length for one in found] == [5, 9]


def test_warm_up_is_training_to_the_wire():
    phases = {"train": "train", "warmup": "train", "eval-on": "eval-on", "eval-off": "eval-off"}
    assert {kind: phase_of(kind) for kind in phases} == phases
    assert [Pass(kind=kind).trains for kind in phases] == [True, True, False, False]


def test_a_pass_that_nobody_announces_trains_or_evaluates_with_compression_on(alone):
    stages, schedule = pipeline()
    run(schedule.step)
    run(schedule.eval)
    run(schedule.step)
    assert sent(stages) == {"train": (2 * COUNT, 0), "eval-on": (COUNT, 0)}


def test_what_was_announced_holds_for_one_pass(alone):
    stages, schedule = pipeline()
    announce(stages, Pass(kind="warmup"))
    run(schedule.step)
    assert sent(stages) == {"train": (COUNT, COUNT * ROWS)}
    run(schedule.step)
    assert sent(stages) == {"train": (2 * COUNT, COUNT * ROWS)}
    announce(stages, Pass(kind="eval-off"))
    run(schedule.eval)
    run(schedule.eval)
    assert sent(stages)["eval-off"] == (COUNT, COUNT * ROWS)
    assert sent(stages)["eval-on"] == (COUNT, 0)


def test_feedback_by_sample_works_in_a_loop_of_ones_own(alone):
    stages, schedule = pipeline("aqsgd(q(4))", slots=SlotCounts(positions=COUNT * ROWS, samples=20))
    for first, full in ((0, 8), (8, 16), (4, 16)):  # the third pass has seen all its samples
        announce(stages, Pass(sample_ids=torch.arange(first, first + COUNT * ROWS)))
        run(schedule.step)
        assert sent(stages)["train"][1] == full
    with pytest.raises((CodecError, RuntimeError), match=r"stage\.begin\(Pass\(sample_ids=\.\.\.\)\) before each pass"):
        run(schedule.step)


@pytest.mark.parametrize(
    ("coming", "act", "told"),
    [
        (Pass(kind="eval-on"), "step", "a pass of kind eval-on comes, but the schedule trains, with a loss function"),
        (Pass(kind="warmup"), "eval", "a pass of kind warmup comes, but the schedule evaluates; begin a training pass"),
        (Pass(sample_ids=[0, 1]), "step", "sample_ids must be a tensor of int64, got list"),
        (Pass(sample_ids=torch.zeros(2)), "step", r"must be int64 \[samples\], got torch.float32 \[2\]"),
        (Pass(sample_ids=torch.zeros(2, 1).long()), "step", r"must be int64 \[samples\], got torch.int64 \[2, 1\]"),
        (Pass(lengths=[3] * 8), "step", "lengths must be a tensor of int64, got list"),
        (
            Pass(lengths=torch.full((4,), 3)),
            "step",
            "lengths must be of each of the 8 samples of a pass, got 4 on stage 0",
        ),
        (Pass(lengths=torch.arange(-1, 7)), "step", "lengths must be at least 0, got -1 on stage 0"),
        (Pass(sample_ids=torch.arange(7)), "step", "must name each of the 8 samples of a pass, got 7 on stage 0"),
    ],
)
def test_a_pass_that_the_schedule_does_not_run_is_told(coming, act, told, alone):
    stages, schedule = pipeline()
    announce(stages, coming)
    with pytest.raises(PipelineError, match=told):
        run(getattr(schedule, act))


def test_an_observer_sees_what_stages_send_as_it_is(alone):
    seen = []

    def observe(channel, microbatch, tensors):
        seen.append((channel.name, microbatch.kind, microbatch.index, [tensor.clone() for tensor in tensors]))

    stages, schedule = pipeline("q(2)", observer=observe)
    run(schedule.step)
    assert sorted(entry[:3] for entry in seen) == [
        (name, "train", index) for name in ("activations", "gradients") for index in range(COUNT)
    ]
    inputs = torch.randn(COUNT * ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    outputs = stages[0].submod(inputs).detach()
    for name, _, index, (tensor,) in seen:
        if name == "activations":
            torch.testing.assert_close(tensor, outputs[index * ROWS : (index + 1) * ROWS])


def test_a_kind_that_there_is_not_is_told():
    with pytest.raises(PipelineError, match="must be one of train, warmup, eval-on, eval-off, got 'eval'"):
        Pass(kind="eval")
