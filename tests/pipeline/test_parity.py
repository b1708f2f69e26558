"""The two oracles: a simulation equals the real processes bit for bit, and `none` equals the unsplit model."""

from importlib.util import find_spec

import pytest
import torch

from support.processes import run
from support.toy import Sampler, Samples, ScaledSamples, Task, make_trainer, processes_of, train, unsplit
from thinwire.pipeline.schedules import SCHEDULES

CODECS = {
    "none": {"activations": "none", "gradients": "none"},
    "bf16": {"activations": "bf16", "gradients": "bf16"},
    "q(4)": {"activations": "q(4)", "gradients": "q(8)"},
    "stochastic": {
        "activations": 'q(2, per="row", round="stochastic")',
        "gradients": 'q(2, per="row", round="stochastic")',
    },
}


def merged(results):
    losses = next(result[0] for result in results if result[0] is not None)
    weights = {stage: state for result in results for stage, state in result[1].items()}
    return losses, weights


def assert_identical(real, simulated):
    assert real[0] == simulated[0]
    assert sorted(real[1]) == sorted(simulated[1])
    for stage, state in real[1].items():
        for name, tensor in state.items():
            assert torch.equal(tensor, simulated[1][stage][name]), f"stage {stage}, {name}"


@pytest.mark.processes
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b-wan", "zbv-zero-bubble"])
@pytest.mark.parametrize("codec", CODECS)
def test_simulation_equals_real_processes_bit_for_bit(schedule, codec, alone):
    stages = 2 * SCHEDULES[schedule].stages_per_process
    options = {"schedule": schedule, "num_stages": stages, "dropout": 0.2, "compression": CODECS[codec]}
    real = merged(run(train, 2, options))
    simulated = merged([train(0, options | {"simulated": True})])
    assert_identical(real, simulated)
    assert len(real[0]) == 3
    assert len(set(real[0])) == 3


@pytest.mark.processes
@pytest.mark.parametrize("schedule", sorted(set(SCHEDULES) - {"gpipe", "1f1b-wan", "zbv-zero-bubble"}))
def test_every_other_schedule_runs_on_two_processes_as_simulated(schedule, alone):
    stages = 2 * SCHEDULES[schedule].stages_per_process
    options = {"schedule": schedule, "num_stages": stages, "compression": CODECS["q(4)"], "microbatches": 4}
    assert_identical(merged(run(train, 2, options)), merged([train(0, options | {"simulated": True})]))


FEEDBACK = {
    "ef": {"activations": "ef(topk(0.25))", "gradients": "ef(q(3))"},
    "efmixed": {"activations": "efmixed(topk(0.25))", "gradients": "q(8)"},
    "ef21": {"activations": "ef21(topk(0.25))", "gradients": "ef21(randk(0.5), store_bits=8)"},
    "ef21 by sample": {"activations": 'ef21(q(2), slot="sample")', "gradients": 'ef21(q(4), slot="sample")'},
    "aqsgd": {"activations": "aqsgd(q(2))", "gradients": "q(4)"},
    "aqsgd stored small": {"activations": "aqsgd(topk(0.25), store_bits=4)", "gradients": "reuse"},
    "reuse": {"activations": "topk(0.25)", "gradients": "reuse"},
    "lowrank": {"activations": 'lowrank(2, values="q(8)") + q(1)', "gradients": "ef(dither(4))"},
    "rotated and outliers": {"activations": 'ef21(q(3, rotate="hadamard"))', "gradients": "q(4, outliers=0.05)"},
    "entropy": {"activations": 'aqsgd(q(2, code="entropy"))', "gradients": 'q(4, code="entropy")'},
    "warm-up and falling bits": {
        "activations": 'aqsgd(q(4 -> 2, over="12 steps"))',
        "gradients": 'ef21(lowrank(1) + q(3 -> 1, over="9 epochs"))',
        "warmup": "2 steps",
    },
}


@pytest.mark.processes
@pytest.mark.parametrize("name", FEEDBACK if find_spec("zstandard") else sorted(set(FEEDBACK) - {"entropy"}))
def test_feedback_is_the_same_simulated_and_its_buffers_equal_at_both_ends(name, alone):
    schedule = "zbv-zero-bubble" if name == "aqsgd" else "gpipe"
    stages = 2 * SCHEDULES[schedule].stages_per_process
    options = {
        "schedule": schedule,
        "num_stages": stages,
        "compression": FEEDBACK[name],
        "steps": 20,
        "accumulation": 2,
        "microbatches": 2,
        "microbatch_size": 2,
    }
    results = run(train, 2, options)
    real, simulated = merged(results), merged([train(0, options | {"simulated": True})])
    assert_identical(real, simulated)
    digests = [found for result in results for found in result[3].values()]
    names = [name for found in digests for name in found]
    kept = {name: {found[name] for found in digests if name in found} for name in names}
    assert all(names.count(name) == 2 for name in kept), "a buffer is kept at both ends"
    assert all(len(hashes) == 1 for hashes in kept.values())
    assert bool(kept) == any("ef21" in method or "aqsgd" in method for method in FEEDBACK[name].values())


def test_codecs_change_the_numbers(alone):
    losses = {name: train(0, {"simulated": True, "compression": codec})[0] for name, codec in CODECS.items()}
    assert len({tuple(values) for values in losses.values()}) == len(CODECS), losses


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("microbatches", "accumulation"), [(4, 1), (8, 1), (4, 2)])
def test_with_none_gradients_equal_the_unsplit_models(schedule, microbatches, accumulation, alone):
    """Masks are unequal, and micro-batches of one sample make some of them masked entirely."""
    stages = 2 * SCHEDULES[schedule].stages_per_process
    trainer = make_trainer(
        0,
        schedule=schedule,
        num_stages=stages,
        microbatches=microbatches,
        microbatch_size=1,
        accumulation=accumulation,
        simulated=True,
        compression=CODECS["none"],
        optimizer={"name": "sgd", "lr": 0.0},
        steps=1,
    )
    kept = keep_gradients(trainer)
    records = []
    trainer.train(records.append)

    model, samples, task = unsplit(stages), Samples(), Task()
    ids = Sampler(microbatches * accumulation).batch(0).ids
    targets = samples.targets(ids)
    assert any(task.num_valid(target) == 0 for target in targets), "no micro-batch is masked entirely"
    loss = task.loss_sum(model(samples.inputs(ids, 0)), targets) / task.num_valid(targets)
    loss.backward()

    assert records[0].loss == pytest.approx(loss.item(), rel=1e-6)
    assert_gradients_of(model, kept)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_side_inputs_reach_every_stage_with_their_own_micro_batch(schedule, alone):
    stages = 2 * SCHEDULES[schedule].stages_per_process
    options = {"schedule": schedule, "num_stages": stages, "compression": CODECS["none"], "samples": ScaledSamples}
    trainer = make_trainer(0, simulated=True, steps=1, optimizer={"name": "sgd", "lr": 0.0}, **options)
    kept, records = keep_gradients(trainer), []
    trainer.train(records.append)

    model, samples, task = unsplit(stages), ScaledSamples(), Task()
    ids = Sampler(8).batch(0).ids
    output = samples.inputs(ids, 0)
    for layer in model:
        output = layer(output, **samples.side(ids))
    targets = samples.targets(ids)
    loss = task.loss_sum(output, targets) / task.num_valid(targets)
    loss.backward()

    assert records[0].loss == pytest.approx(loss.item(), rel=1e-6)
    assert_gradients_of(model, kept)


@pytest.mark.processes
def test_side_inputs_on_real_processes_are_those_of_a_simulation(alone):
    options = {"compression": CODECS["q(4)"], "samples": ScaledSamples}
    real = merged(run(train, 2, options))
    assert_identical(real, merged([train(0, options | {"simulated": True})]))
    assert real[0] != train(0, options | {"simulated": True, "samples": Samples})[0]


def assert_gradients_of(model, kept):
    """Check the gradients by (stage, name) against those of the unsplit model."""
    for index, layer in enumerate(model):
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(kept[index, name], parameter.grad, rtol=1e-5, atol=1e-7)


def keep_gradients(trainer):
    """Gradients by (stage, name) as the optimizers find them, before they are cleared."""
    kept = {}
    update = trainer._update

    def keeping(step, optimizers):
        for stage in trainer.stages:
            for name, parameter in stage.submod.named_parameters():
                kept[stage.stage_index, name] = parameter.grad.clone()
        return update(step, optimizers)

    trainer._update = keeping
    return kept


def test_the_clipped_norm_is_that_of_all_stages(alone):
    trainer = make_trainer(0, num_stages=3, simulated=True, steps=1, optimizer={"lr": 0.0, "max_grad_norm": 1e-3})
    kept, records = keep_gradients(trainer), []
    trainer.train(records.append)
    whole = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in kept.values()]).double())
    assert records[0].grad_norm == pytest.approx(float(whole), rel=1e-12)


@pytest.mark.processes
def test_frames_are_as_many_and_as_long_as_planned():
    options = {"num_stages": 2, "microbatches": 4, "steps": 2, "compression": CODECS["q(4)"]}
    results = run(train, processes_of("gpipe", 2), options)
    elements = 2 * 3 * 12
    rows = 2 * 3
    forward = results[0][2][0][0, "activations", "train"]
    backward = results[1][2][1][0, "gradients", "train"]
    assert (forward.frames, backward.frames) == (8, 8)
    assert forward.bytes == 8 * (64 + elements // 2 + 2 * rows)
    assert backward.bytes == 8 * (64 + elements + 2 * rows)
    assert forward.uncompressed == backward.uncompressed == 8 * 4 * elements
