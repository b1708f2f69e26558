import gc
import inspect
import re
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from support.processes import outcomes_of, run
from support.toy import make_trainer, needs_inference
from thinwire.pipeline import (
    BoundaryOptions,
    CompressedStage,
    CompressionOptions,
    SlotCounts,
    Wire,
    WireOptions,
    compressed,
)
from thinwire.pipeline.errors import OptionsError, PipelineError
from thinwire.pipeline.schedules import actions, build_merged, merge
from thinwire.pipeline.wire.handshake import differences
from thinwire.pipeline.wire.passes import Pass

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
        for rank, (plain, ours) in enumerate(run(plain_and_compressed, 2, schedule_class, expression)):
            assert (plain[0] is None) == (rank == 0)
            pairs = list(zip(plain[1], ours[1], strict=True))
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


@pytest.mark.parametrize("codec", ["none", "q(8)", "ef21(q(8))"])
def test_training_follows_an_evaluation_in_inference_mode(codec, alone):
    inputs, targets = batch()
    found = []
    for context in (torch.no_grad, torch.inference_mode):
        modules, example = [layer(0), layer(1)], torch.empty(2, WIDTH, requires_grad=True)
        wire = Wire(CompressionOptions(activations=codec, gradients=codec))
        stages = [
            CompressedStage(module, index, 2, torch.device("cpu"), input_args=example, output_args=example, wire=wire)
            for index, module in enumerate(modules)
        ]
        schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.mse_loss)
        with context():
            schedule.eval(inputs, target=targets)
        for _ in range(2):
            schedule.step(inputs, target=targets)
        found.append([parameter.grad for module in modules for parameter in module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def without_examples(rank):
    """The same step through torch's stage and ours, neither with examples, and ours by codec: gradients and bytes."""
    inputs, targets = batch()
    found = {}
    for codecs in (None, "none", "q(4)/q(8)"):
        module = layer(rank)
        if codecs is None:
            stage = PipelineStage(module, rank, 2, torch.device("cpu"))
        else:
            with compressed(codecs):
                stage = CompressedStage(module, rank, 2, torch.device("cpu"))
        stage.submod = nn.Sequential(module)  # as by a program that wraps modules once the stage is there
        # torch divides gradients after an evaluation too
        schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss, scale_grads=False)
        for act in (schedule.step, schedule.eval, schedule.step):
            act(*([inputs] if rank == 0 else []), **({"target": targets} if rank == 1 else {}))
        sent = {}
        if codecs is not None:
            stage.flush()
            sent = {name: traffic.bytes for (_, name, phase), traffic in stage.meter.sent.items() if phase == "train"}
        found[codecs] = [parameter.grad.clone() for parameter in module.parameters()], sent
    return found


@needs_inference
@pytest.mark.processes
def test_a_stage_without_examples_and_wire_trains_as_torchs_does_with_the_codecs_around_it():
    for rank, found in enumerate(run(without_examples, 2)):
        name, elements = ("activations", 2 * WIDTH) if rank == 0 else ("gradients", 2 * WIDTH)
        assert all(torch.equal(a, b) for a, b in zip(found[None][0], found["none"][0], strict=True))
        assert all(torch.allclose(a, b, atol=0.1) for a, b in zip(found[None][0], found["q(4)/q(8)"][0], strict=True))
        assert found["none"][1] == {name: 8 * (64 + 4 * elements)}
        assert found["q(4)/q(8)"][1][name] < found["none"][1][name]


def evaluating_otherwise(rank):
    """Training, and evaluation by a stage of its own with larger micro-batches, in turn over one Wire; what came out.

    And one stage in two schedules of several numbers of micro-batches.
    """
    inputs, targets = batch()
    wire, module, results = Wire(CompressionOptions(activations="none", gradients="ef(q(8))")), layer(rank), []
    small, large = torch.empty(2, WIDTH), torch.empty(BATCH // 2, WIDTH)
    device = torch.device("cpu")
    trains = CompressedStage(module, rank, 2, device, input_args=small, output_args=small, wire=wire)
    evaluates = CompressedStage(module, rank, 2, device, input_args=large, output_args=large, wire=wire)
    step = Schedule1F1B(trains, 4, loss_fn=nn.functional.mse_loss).step
    shorter = Schedule1F1B(trains, 2, loss_fn=nn.functional.mse_loss)
    whole = Schedule1F1B(evaluates, 2, loss_fn=nn.functional.mse_loss)
    for _ in range(2):
        step(*([inputs] if rank == 0 else []), **({"target": targets} if rank else {}))
        for evaluate, part in ((whole.eval, slice(None)), (shorter.eval, slice(4))):
            given = {"target": targets[part]} if rank else {}
            results.append(evaluate(*([inputs[part]] if rank == 0 else []), **given))
    for stage in (trains, evaluates):
        stage.flush()
    return results


@pytest.mark.processes
def test_evaluation_may_have_micro_batches_of_its_own_over_the_wire_of_training():
    _, results = run(evaluating_otherwise, 2)
    model = nn.Sequential(layer(0), layer(1))
    wanted = model(batch()[0])
    for found, rows in zip(results, (8, 4, 8, 4), strict=True):
        torch.testing.assert_close(found, wanted[:rows])


def pair_of(wire, rows=2):
    """Both stages of a pipeline here, over a Wire, and their schedule for the whole batch."""
    example = torch.empty(rows, WIDTH)
    stages = [
        CompressedStage(layer(index), index, 2, torch.device("cpu"), example, example, wire=wire) for index in range(2)
    ]
    return stages, ScheduleInterleaved1F1B(stages, BATCH // rows, loss_fn=nn.functional.mse_loss)


def test_two_stages_around_a_module_have_files_of_their_own_for_their_buffers(alone, tmp_path):
    """The second one was told that another store uses its file, and to take another folder for each run."""
    wire = Wire(CompressionOptions(activations="none", gradients='ef(q(8), store="disk")', store_folder=str(tmp_path)))
    modules, (inputs, targets) = [layer(0), layer(1)], batch()
    for rows in (2, 1):
        example = torch.empty(rows, WIDTH)
        stages = [
            CompressedStage(module, index, 2, torch.device("cpu"), example, example, wire=wire)
            for index, module in enumerate(modules)
        ]
        schedule = build_merged(merge(actions("gpipe", 2, 2, 4)), stages, 4, nn.functional.mse_loss)
        schedule.step(inputs[: 4 * rows], target=targets[: 4 * rows])
        names = sorted(path.name for path in tmp_path.glob("*.slots"))
        for stage in stages:
            stage.flush()
    assert names == ["boundary-0-gradients-0-sender-1-train.slots", "boundary-0-gradients-0-sender-train.slots"]


def test_codecs_of_a_boundary_that_the_pipeline_does_not_have_are_refused(alone):
    """Whoever counted boundaries from 1 trained with the common codec, without a word."""
    counted_from_1 = {1: BoundaryOptions(activations="none", gradients="none")}
    _, schedule = pair_of(Wire(CompressionOptions(activations="q(2)", boundaries=counted_from_1)))
    with pytest.raises(OptionsError, match=r"compression\.boundaries must lie in 0\.\.0 for 2 stages, got 1"):
        schedule.step(batch()[0])


def of_changing_sizes(rank):
    """Steps and evaluations of one schedule by turns, with micro-batches of 2, 4 and 1 rows: losses and gradients.

    Through torch's stage, through ours with a codec, and with one that keeps buffers, until it refuses.
    """
    found = {}
    for codecs in (None, "none", "ef(none)"):
        module = layer(rank)
        with compressed(codecs or "none"):
            stage = (CompressedStage if codecs else PipelineStage)(module, rank, 2, torch.device("cpu"))
        # torch divides gradients after an evaluation too
        schedule, told = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss, scale_grads=False), []
        inputs, targets = (torch.cat([each, each]) for each in batch())
        try:
            for act, rows in ((schedule.step, 8), (schedule.eval, 16), (schedule.step, 8), (schedule.eval, 4)):
                losses = []
                last = {"target": targets[:rows], "losses": losses} if rank else {}
                act(*([] if rank else [inputs[:rows]]), **last)
                told.append([float(loss) for loss in losses])
        except PipelineError as error:
            told.append(str(error))
        found[codecs] = told, [parameter.grad for parameter in module.parameters()]
        if codecs:
            stage.flush()
    return found


@needs_inference
@pytest.mark.processes
def test_sizes_may_change_where_torch_looks_at_them_again_unless_buffers_hang_on_them():
    for rank, found in enumerate(run(of_changing_sizes, 2)):
        assert [len(losses) for losses in found[None][0]] == 4 * [4 * rank]
        assert found["none"][0] == found[None][0]
        assert all(torch.equal(a, b) for a, b in zip(found["none"][1], found[None][1], strict=True))
        assert found["ef(none)"][0][-1].startswith(
            "what crosses boundary 0 must keep its shapes, because ef(none) keeps a buffer for each sample, got "
            "[[4, 6]] after [[2, 6]]; build another stage around the same module for it"
        )


class Noting(nn.Module):
    """Hands on a scale beside its output, or takes one and notes it."""

    def __init__(self, index):
        super().__init__()
        self.layer, self.is_first, self.scales = layer(index), index == 0, []

    def forward(self, x, scale=None):
        if self.is_first:
            return self.layer(x), x * 1.2345
        self.scales.append(scale.clone())
        return self.layer(x) * scale


@needs_inference
@pytest.mark.parametrize("codec", ["q(4)", "ef(q(4))"])
@pytest.mark.parametrize("rows", [8, 16])
def test_what_needs_no_gradient_crosses_as_it_is_though_an_evaluation_came_first(codec, rows, alone):
    """And in an evaluation after training, of the same size or another; torch describes none as needing gradients."""
    modules = [Noting(0), Noting(1)]
    with compressed(codec if rows == 8 else "q(4)"):
        stages = [CompressedStage(module, index, 2, torch.device("cpu")) for index, module in enumerate(modules)]
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.mse_loss)
    inputs, targets = batch()
    larger = inputs.repeat(rows // BATCH, 1), targets.repeat(rows // BATCH, 1)
    schedule.eval(larger[0], target=larger[1])
    step = schedule.step, (inputs, targets)
    for act, (x, y) in (step, step, (schedule.eval, larger)):
        modules[1].scales.clear()
        act(x, target=y)
        assert torch.equal(torch.cat(modules[1].scales[-4:]), x * 1.2345)
    assert [example.requires_grad for example in stages[0].outputs] == [True, False]


class FullOnce(nn.Module):
    """Has no memory for its first micro-batch."""

    def __init__(self, module):
        super().__init__()
        self.module, self.calls = module, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 1:
            raise torch.OutOfMemoryError("full")
        return self.module(x)


def tried_again(rank):
    """A step that fails in the first stage before anything is sent, and again; the other process waits meanwhile."""
    example, module = torch.empty(2, WIDTH), layer(rank)
    wire = Wire(CompressionOptions(activations="none", gradients="none"))
    stage = CompressedStage(
        FullOnce(module) if rank == 0 else module, rank, 2, torch.device("cpu"), example, example, wire=wire
    )
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    inputs, targets = batch()
    if rank == 0:
        with pytest.raises(PipelineError, match="stage 0 needs more memory"):
            schedule.step(inputs)
    for _ in range(2):
        schedule.step(*([inputs] if rank == 0 else []), **({"target": targets} if rank else {}))
    stage.flush()
    return [parameter.grad for parameter in module.parameters()], dict(stage.passes)


@pytest.mark.processes
def test_a_step_that_failed_before_anything_was_sent_can_be_tried_again():
    model, (inputs, targets) = [layer(0), layer(1)], batch()
    for _ in range(2):
        for part, target in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            nn.functional.mse_loss(model[1](model[0](part)), target).backward()
        for parameter in nn.ModuleList(model).parameters():
            parameter.grad /= 4  # as torch does at the end of each step
    for module, (gradients, passes) in zip(model, run(tried_again, 2), strict=True):
        assert passes["train"] == 1
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


def of_another_group(rank):
    alone, _ = dist.new_subgroups(1)
    example = torch.empty(2, WIDTH)
    with pytest.raises(OptionsError) as caught:
        CompressedStage(layer(0), 0, 1, torch.device("cpu"), example, example, group=alone, wire=Wire())
    return str(caught.value)


@pytest.mark.processes
def test_a_wire_of_another_group_is_refused_at_once():
    for rank, told in enumerate(run(of_another_group, 2)):
        assert told.startswith(f"a stage and its Wire must have the same process group, got ranks [{rank}] for")


def test_a_wire_for_each_stage_of_a_process_is_refused_at_once(alone):
    example = torch.empty(2, WIDTH)
    stages = [
        CompressedStage(layer(index), index, 2, torch.device("cpu"), example, example, wire=Wire())
        for index in range(2)
    ]
    with pytest.raises(PipelineError, match=r"must share one Wire, but stage 1 has another one than stages \[0\] of"):
        stages[0].connect()


@pytest.mark.slow
def test_stages_without_a_wire_share_one_for_each_pipeline_and_pair_of_codecs(alone):
    def stage(index):
        example = torch.empty(2, WIDTH)
        return CompressedStage(layer(index), index, 2, torch.device("cpu"), example, example)

    first, last = stage(0), stage(1)
    assert last.wire is first.wire
    assert first.wire.compression == CompressionOptions()
    with compressed("topk(0.5)"):
        other = stage(0)
    assert (other.wire.compression.activations, other.wire.compression.gradients) == ("topk(0.5)", "topk(0.5)")
    again = stage(0)  # another pipeline, as the first has this stage
    assert again.wire is not first.wire
    ScheduleInterleaved1F1B([first, last], 4, loss_fn=nn.functional.mse_loss).eval(batch()[0], target=batch()[1])
    assert stage(1).wire is again.wire
    kept = weakref.ref(first.wire)
    del first, last
    gc.collect()
    assert kept() is None, "a pipeline that is gone holds no memory"


class Shifted(nn.Module):
    """Its output is nothing that its graph needs."""

    def __init__(self):
        super().__init__()
        self.shift, self.returned = nn.Parameter(torch.zeros(WIDTH)), []

    def forward(self, x):
        output = x + self.shift
        self.returned.append(weakref.ref(output.untyped_storage()))
        return output


def test_outputs_are_let_go_once_they_are_sent_and_gradients_are_the_same(alone):
    inputs, targets = batch()
    modules, alive = [Shifted(), layer(1)], []

    def loss_fn(output, target):
        alive.append(sum(one() is not None for one in modules[0].returned))
        return nn.functional.mse_loss(output, target)

    with compressed("none"):
        stages = [
            CompressedStage(module, index, 2, torch.device("cpu"), *2 * [torch.empty(2, WIDTH)])
            for index, module in enumerate(modules)
        ]
    ScheduleLoopedBFS(stages, 4, loss_fn=loss_fn).step(inputs, target=targets)
    assert len(modules[0].returned) > 3
    assert max(alive[-4:]) <= 1
    nn.functional.mse_loss(modules[1](inputs + (shift := torch.zeros(WIDTH, requires_grad=True))), targets).backward()
    torch.testing.assert_close(modules[0].shift.grad, shift.grad)


@pytest.mark.skipif(not hasattr(PipelineStage, "register_forward_context"), reason="torch 2.15 brings it")
def test_a_context_that_torch_puts_around_forwards_is_around_ours(alone):
    example, (inputs, targets) = torch.empty(2, WIDTH), batch()
    stages = [CompressedStage(layer(at), at, 2, torch.device("cpu"), example, example) for at in range(2)]
    seen = []
    handle = stages[1].register_forward_context(lambda info: seen.append(info.microbatch_index) or nullcontext())
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.mse_loss)
    schedule.step(inputs, target=targets)
    handle.remove()
    schedule.step(inputs, target=targets)
    assert seen == [0, 1, 2, 3]


@pytest.mark.skipif("arg_mbs" not in inspect.signature(Schedule1F1B.step).parameters, reason="this torch splits itself")
def test_an_input_of_a_micro_batch_keeps_its_gradient(alone):
    """torch drops it."""
    example, (inputs, targets) = torch.empty(2, WIDTH, requires_grad=True), batch()
    modules, wanted = [layer(0), layer(1)], inputs.clone().requires_grad_()
    with compressed("none"):
        stages = [CompressedStage(one, at, 2, torch.device("cpu"), example, example) for at, one in enumerate(modules)]
    given = [one.clone().requires_grad_() for one in inputs.chunk(4)]
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.MSELoss(reduction="sum"), scale_grads=False)
    schedule.step(arg_mbs=[(one,) for one in given], target_mbs=list(targets.chunk(4)))
    nn.functional.mse_loss(modules[1](modules[0](wanted)), targets, reduction="sum").backward()
    torch.testing.assert_close(torch.cat([one.grad for one in given]), wanted.grad)


def test_pipelines_whose_stages_are_built_in_turns_have_wires_in_the_order_of_their_stages(alone):
    """A set had no order: each process chose among the pipelines by chance, and then they waited for each other."""
    example = torch.empty(2, WIDTH)
    firsts, lasts = (
        [CompressedStage(layer(index), index, 2, torch.device("cpu"), example, example) for _ in range(8)]
        for index in range(2)
    )
    assert [stage.wire for stage in lasts] == [stage.wire for stage in firsts]


@needs_inference  # an older torch refuses such inputs itself
@pytest.mark.parametrize("examples", [(), (torch.empty(2, WIDTH), torch.empty(2, WIDTH))], ids=["none", "given"])
def test_a_smaller_last_batch_between_two_steps_is_to_be_dropped(alone, examples):
    with compressed("none"):
        stages = [CompressedStage(layer(index), index, 2, torch.device("cpu"), *examples) for index in range(2)]
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.mse_loss)
    inputs, targets = batch()
    schedule.step(inputs, target=targets)
    with pytest.raises(
        PipelineError, match=r"\(2, 6\).* has .*\(1, 6\).*; drop a smaller last batch \(drop_last=True\), or make a new"
    ):
        schedule.step(inputs[:7], target=targets[:7])


@pytest.mark.parametrize(
    ("codecs", "told"),
    [
        ("q(4)/q(9)", "compressed('q(4)/q(9)'): gradients: q's bits must"),
        ("q(4)/", "compressed('q(4)/'): gradients: '' is not a codec"),
        (None, "compressed(None): activations and gradients: 'None' is not a codec"),
    ],
)
def test_a_wrong_codec_of_stages_without_a_wire_is_named_by_its_channel(codecs, told):
    with pytest.raises(OptionsError, match=f"^{re.escape(told)}"), compressed(codecs):
        pass


def accumulating(scale, gradients="none", positions=None):
    """Two stages here, and what runs a pass of an accumulated batch."""
    slots = None if positions is None else SlotCounts(positions=positions)
    wire, example = (
        Wire(CompressionOptions(activations="none", gradients=gradients), slots=slots),
        torch.empty(2, WIDTH),
    )
    stages = [
        CompressedStage(layer(index), index, 2, torch.device("cpu"), example, example, wire=wire) for index in range(2)
    ]
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.mse_loss, scale_grads=scale)

    def run_pass(index):
        for stage in stages:
            stage.begin(Pass(accumulation=index))
        schedule.step(batch()[0], target=batch()[1])

    return run_pass


def test_a_schedule_that_divides_gradients_is_refused_where_passes_are_accumulated(alone):
    run_pass = accumulating(scale=True)
    run_pass(0)
    with pytest.raises(PipelineError, match=r"must not divide gradients where .* give the schedule scale_grads=False"):
        run_pass(1)


def test_accumulated_passes_need_a_slot_for_each_position(alone):
    run_pass = accumulating(scale=False, gradients="ef(q(8))", positions=2 * BATCH)
    run_pass(0)
    run_pass(1)
    with pytest.raises(ValueError, match="has 16, but a pass reaches position 18; give the samples"):
        run_pass(2)


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


@needs_inference
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


@pytest.mark.parametrize("examples", [True, pytest.param(False, marks=needs_inference)])
def test_whole_numbers_that_a_module_cannot_compute_with_are_told(alone, examples):
    """The sentence was torch's, about the two matrices of a product."""
    given = [torch.empty(2, WIDTH, dtype=torch.int64), torch.empty(2, WIDTH)] if examples else []
    stage = CompressedStage(layer(0), 0, 1, torch.device("cpu"), *given, wire=Wire())
    with pytest.raises(
        PipelineError, match=r"^stage 0 must get inputs of the type .*, got int64: .*; give it floating"
    ):
        Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss).step(batch()[0].long(), target=batch()[1])


def test_torch_looks_for_no_gradients_that_no_example_is_marked_for(alone):
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL it refused each gradient."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        _, schedule = pair_of(Wire())
        schedule.step(batch()[0], target=batch()[1])
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


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
