import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from support.processes import outcomes_of, run
from support.toy import make_trainer
from thinwire.models.autoencoder import EncoderHalf
from thinwire.pipeline import CompressedStage, CompressionOptions, Wire, WireOptions
from thinwire.pipeline.errors import OptionsError, PipelineError
from thinwire.pipeline.handshake import differences
from thinwire.pipeline.passes import Pass
from thinwire.pipeline.schedules import actions, build_merged, merge

BATCH, WIDTH = 8, 6


def layer(index):
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def batch():
    generator = torch.Generator().manual_seed(7)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)


def plain_and_compressed(rank, schedule_class, expression):
    """The same step through torch's own stage and through ours: (outputs, gradients) of each."""
    inputs, targets = batch()
    example = torch.empty(2, WIDTH, requires_grad=True)
    results = []
    wire = Wire(CompressionOptions(activations=expression, gradients=expression))
    for make in (PipelineStage, lambda *a, **k: CompressedStage(*a, **k, wire=wire)):
        module = layer(rank)
        stage = make(module, rank, 2, torch.device("cpu"), input_args=example, output_args=example)
        schedule = schedule_class(stage, 4, loss_fn=nn.functional.mse_loss)
        output = schedule.step(*([inputs] if rank == 0 else []), **({"target": targets} if rank == 1 else {}))
        if isinstance(stage, CompressedStage):
            stage.flush()
        results.append((output, [parameter.grad.clone() for parameter in module.parameters()]))
    return results


@pytest.mark.processes
@pytest.mark.parametrize("schedule_class", [ScheduleGPipe, Schedule1F1B])
def test_in_place_of_torchs_stage_none_gives_torchs_numbers_and_a_codec_others(schedule_class):
    for expression, same in (("none", True), ("q(4)", False)):
        for rank, (plain, compressed) in enumerate(run(plain_and_compressed, 2, schedule_class, expression)):
            assert (plain[0] is None) == (rank == 0)
            pairs = list(zip(plain[1], compressed[1], strict=True))
            assert all(torch.equal(a, b) for a, b in pairs) == same
            assert all(torch.allclose(a, b, atol=0.1) for a, b in pairs)


def evaluations_around_training(rank):
    """Evaluation before, between and after training steps, compressed and not."""
    trainer = make_trainer(rank, steps=2, compression={"activations": "q(2)", "gradients": "q(8)"})
    (stage,) = trainer.stages
    samples, ids = trainer.samples, trainer.sampler.batch(0).ids
    inputs = samples.inputs(ids, 0) if trainer.runner.has_first else None
    targets = samples.targets(ids) if trainer.runner.has_last else None

    def both():
        values = []
        for kind in ("eval-on", "eval-off"):
            with torch.no_grad():
                losses = trainer.runner.run(Pass(kind=kind, sample_ids=ids), samples.side(ids), inputs, targets)
                values.append(sum(float(loss) for loss in losses))
        return values

    losses = []
    scores = [both()]
    for step in range(2):
        losses.append(trainer.train_step(step).loss)
        scores.append(both())
    phases = {key[2]: traffic.frames for key, traffic in stage.meter.sent.items()}
    return scores, losses, phases


@pytest.mark.processes
def test_evaluation_before_between_and_after_training():
    first, last = run(evaluations_around_training, 2)
    scores, losses, _ = last
    assert len({tuple(score) for score in scores}) == 3
    assert all(on != off for on, off in scores)
    assert all(torch.isfinite(torch.tensor(losses)))
    assert first[2] == {"train": 8, "eval-on": 12, "eval-off": 12}
    assert last[2] == {"train": 8}


class TwoOut(nn.Module):
    """Hidden states, integer ids, and a float mask that needs no gradient; the second hidden tensor is never used."""

    def forward(self, hidden):
        ids = torch.arange(hidden.shape[0])
        return hidden * 2, ids, torch.full_like(hidden, 3.0), hidden * 5


class TwoIn(nn.Module):
    def forward(self, hidden, ids, mask, unused):
        assert not ids.requires_grad
        assert not mask.requires_grad
        assert unused.requires_grad == torch.is_grad_enabled()
        return (hidden * mask + ids[:, None]).sum(-1)


def tuples_and_none_gradients(rank):
    hidden = torch.empty(2, WIDTH, requires_grad=True)
    between = (
        hidden,
        torch.empty(2, dtype=torch.int64),
        torch.empty(2, WIDTH),
        torch.empty(2, WIDTH, requires_grad=True),
    )
    weight = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.eye_(weight.weight)
    module = nn.Sequential(weight, TwoOut()) if rank == 0 else TwoIn()
    stage = CompressedStage(
        module,
        rank,
        2,
        torch.device("cpu"),
        input_args=hidden if rank == 0 else between,
        output_args=between if rank == 0 else torch.empty(2),
        wire=Wire(CompressionOptions(activations="bf16", gradients="none")),
    )
    schedule = ScheduleGPipe(stage, 4, loss_fn=lambda output, target: (output * target).sum(), scale_grads=False)
    inputs = torch.ones(BATCH, WIDTH)
    schedule.step(*([inputs] if rank == 0 else []), **({"target": torch.ones(BATCH)} if rank == 1 else {}))
    stage.flush()
    return weight.weight.grad


@pytest.mark.processes
def test_a_boundary_carries_tuples_and_a_gradient_may_be_none():
    gradient, _ = run(tuples_and_none_gradients, 2)
    assert torch.equal(gradient, torch.full((WIDTH, WIDTH), BATCH * 2.0 * 3.0))


@pytest.mark.skipif(not hasattr(PipelineStage, "_forward_metadata_inference"), reason="this torch learns no shapes")
def test_a_stage_without_examples_connects_only_in_its_first_step(alone):
    stage = CompressedStage(layer(0), 0, 1, torch.device("cpu"), wire=Wire())
    with pytest.raises(OptionsError, match="must know its shapes before it connects; give input_args and output_args"):
        stage.connect()


def test_an_output_of_another_dtype_is_told(alone):
    wire, example = Wire(), torch.empty(2, WIDTH)
    stages = [
        CompressedStage(layer(index).to(torch.bfloat16), index, 2, torch.device("cpu"), example, example, wire=wire)
        for index in range(2)
    ]
    schedule = build_merged(merge(actions("gpipe", 2, 2, 4)), stages, 4, nn.functional.mse_loss)
    # torch 2.11 looks at the first stage's inputs before we see an output, and says so in its own words
    with pytest.raises(
        RuntimeError, match=r"stage 0 announced .*float32.* but has .*bfloat16|value 0 has a dtype mismatch"
    ):
        schedule.step(batch()[0].bfloat16(), target=batch()[1])


def test_one_process_runs_the_merged_order_and_nothing_else(alone):
    wire, example = Wire(), torch.empty(2, WIDTH)
    stages = [
        CompressedStage(layer(index), index, 2, torch.device("cpu"), example, example, wire=wire) for index in range(2)
    ]
    order = merge(actions("gpipe", 2, 2, 4))
    schedule = build_merged(order, stages, 4, nn.functional.mse_loss)
    assert schedule.pipeline_order_with_comms == {0: order}


def test_dropout_is_seeded_by_the_moment_and_leaves_the_generator_alone(alone):
    def outputs(first_layer):
        stage = CompressedStage(
            nn.Dropout(0.5),
            0,
            1,
            torch.device("cpu"),
            torch.empty(2, 64),
            torch.empty(2, 64),
            wire=Wire(seed=3),
            first_layer=first_layer,
        )
        schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, target: output.sum())
        torch.manual_seed(0)
        steps = [schedule.step(torch.ones(4, 64, requires_grad=True), target=torch.ones(4)) for _ in range(2)]
        return steps, float(torch.rand(1))

    torch.manual_seed(0)
    untouched = float(torch.rand(1))
    first, after = outputs(4)
    again, _ = outputs(4)
    other, _ = outputs(5)
    assert after == untouched
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0][:2], first[0][2:])
    assert not torch.equal(first[0], other[0])


def started_differently(rank, kind):
    example = torch.empty(2, WIDTH)
    compression = CompressionOptions(activations="q(4)" if rank or kind == "seed" else "q(2)")
    wire = Wire(compression, WireOptions(timeout=20), seed=3 * rank, agreement={"training.steps": 5 + rank, "same": 1})
    if kind == "torch":
        wire = Wire(compression=CompressionOptions(), agreement={"torch": f"2.{rank}"})
    stage = CompressedStage(layer(rank), rank, 2, torch.device("cpu"), example, example, wire=wire)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stage.connect()
    return [str(warning.message) for warning in caught if "boundary" in str(warning.message)]


@pytest.mark.processes
def test_ends_that_were_started_differently_stop_with_every_difference():
    for rank, (returned, told) in outcomes_of(started_differently, 2, "everything").items():
        assert not returned
        assert f"the two ends of boundary 0 must be started alike; stage {rank} (here) and stage {1 - rank}" in told
        assert "activations codec: 'q(" in told
        assert f"seed: {3 * rank} here, {3 - 3 * rank} there" in told
        assert f"training.steps: {5 + rank} here, {6 - rank} there" in told
        assert "same:" not in told


@pytest.mark.processes
def test_another_torch_version_only_warns():
    for rank, told in enumerate(run(started_differently, 2, "torch")):
        assert told == [
            f"boundary 0: stage {rank} runs torch 2.{rank}, stage {1 - rank} 2.{1 - rank}; results may differ in the "
            f"last bits"
        ]


def test_differences_name_what_only_one_side_has():
    assert differences({"a": 1, "b": 2}, {"b": 3, "c": 4}) == {"a": (1, None), "b": (2, 3), "c": (None, 4)}


def alone_at_the_boundary(rank):
    if rank == 1:
        example = torch.empty(2, WIDTH)
        stage = CompressedStage(layer(1), 1, 2, torch.device("cpu"), example, example, wire=late_wire(rank))
        with pytest.raises(PipelineError) as caught:
            stage.connect()
        return str(caught.value)
    late_wire(rank)
    return None


def late_wire(rank):
    dist.barrier()
    return Wire(options=WireOptions(timeout=2))


@pytest.mark.processes
def test_a_neighbour_that_says_nothing_at_start_is_told():
    told = run(alone_at_the_boundary, 2)[1]
    assert told.startswith("stage 1 was waiting for the configuration of stage 0 at boundary 0: "), told


def test_the_boundaries_have_a_group_of_their_own(alone):
    assert Wire().group is not dist.group.WORLD


def test_a_codec_with_weights_needs_them_in_the_module(alone):
    wire, example = Wire(CompressionOptions(activations="autoencoder(4)")), torch.empty(2, WIDTH)
    stages = [CompressedStage(layer(i), i, 2, torch.device("cpu"), example, example, wire=wire) for i in range(2)]
    with pytest.raises(OptionsError, match=r"has weights at both sides of boundary 0, and stage 1 has no decoder of"):
        stages[1].connect()
    learned = nn.Sequential(layer(0), EncoderHalf("autoencoder.1", 4, [WIDTH]))
    with pytest.raises(OptionsError, match=r"at boundary 0 must be autoencoder\(4\), got q\(4\)"):
        CompressedStage(learned, 0, 2, torch.device("cpu"), example, example, wire=Wire()).connect()
