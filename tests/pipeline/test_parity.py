"""The two oracles: a simulation equals the real processes bit for bit, and `none` equals the unsplit model."""

import pytest
import torch

from support.processes import run
from support.toy import Sampler, Samples, ScaledSamples, Task, make_trainer, train, unsplit
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


FEEDBACK = {
    "ef": {"activations": "ef(topk(0.25))", "gradients": "ef(q(3))"},
    "efmixed": {"activations": "efmixed(topk(0.25))", "gradients": "q(8)"},
    "ef21": {"activations": "ef21(topk(0.25))", "gradients": "ef21(randk(0.5), store_bits=8)"},
    "ef21 by sample": {"activations": 'ef21(q(2), slot="sample")', "gradients": 'ef21(q(4), slot="sample")'},
    "aqsgd": {"activations": "aqsgd(q(2))", "gradients": "q(4)"},
    "codebook": {"activations": "q(8, step=0.4, codebook=4)", "gradients": "q(4)"},
    "aqsgd stored small": {"activations": "aqsgd(topk(0.25), store_bits=4)", "gradients": "reuse"},
    "reuse": {"activations": "topk(0.25)", "gradients": "reuse"},
    "stochastic": {"activations": "q(4)", "gradients": 'ef(q(4, round="stochastic"))'},
    "entropy": {"activations": 'aqsgd(q(2, code="entropy"))', "gradients": 'q(4, code="entropy")'},
    "warm-up": {
        "activations": "aqsgd(q(4))",
        "gradients": "ef21(q(4))",
        "warmup": "2 steps",
    },
}


def two_processes_of(schedule, **options):
    return {"schedule": schedule, "num_stages": 2 * SCHEDULES[schedule].stages_per_process, **options}


DROPPING = {
    f"{schedule}, {codec}": two_processes_of(schedule, dropout=0.2, compression=CODECS[codec])
    for schedule in ("gpipe", "1f1b-wan", "zbv-zero-bubble")
    for codec in CODECS
}
ORDERS = {schedule: two_processes_of(schedule, compression=CODECS["q(4)"]) for schedule in sorted(SCHEDULES)}
KEEPING = {
    name: two_processes_of(
        "zbv-zero-bubble" if name == "aqsgd" else "gpipe",
        compression=compression,
        steps=8,
        accumulation=2,
        microbatches=2,
    )
    for name, compression in FEEDBACK.items()
}
SIDE = {"side inputs": {"compression": CODECS["q(4)"], "samples": ScaledSamples}}
CASES = DROPPING | ORDERS | KEEPING | SIDE


def train_each(rank, cases):
    return {name: train(rank, options) for name, options in cases.items()}


@pytest.fixture(scope="module")
def real():
    """What each of two processes returns for each case; to start them takes longer than to train a case."""
    return run(train_each, 2, CASES, timeout=240)


def compared(name, real):
    """What the processes return for a case, after a comparison with its simulation."""
    results = [found[name] for found in real]
    assert_identical(merged(results), merged([train(0, CASES[name] | {"simulated": True})]))
    return results


@pytest.mark.processes
@pytest.mark.parametrize("name", DROPPING)
def test_simulation_equals_real_processes_bit_for_bit(name, real, alone):
    losses, _ = merged(compared(name, real))
    assert len(losses) == len(set(losses)) == 3


@pytest.mark.processes
@pytest.mark.parametrize("schedule", ORDERS)
def test_every_schedule_runs_on_two_processes_as_simulated(schedule, real, alone):
    compared(schedule, real)


@pytest.mark.processes
@pytest.mark.parametrize("name", KEEPING)
def test_feedback_is_the_same_simulated_and_its_buffers_equal_at_both_ends(name, real, alone):
    results = compared(name, real)
    digests = [found for result in results for found in result[3].values()]
    names = [name for found in digests for name in found]
    kept = {name: {found[name] for found in digests if name in found} for name in names}
    assert all(names.count(name) == 2 for name in kept), "a buffer is kept at both ends"
    assert all(len(hashes) == 1 for hashes in kept.values())
    assert bool(kept) == any(
        word in method for method in FEEDBACK[name].values() for word in ("ef21", "aqsgd", "codebook")
    )


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
def test_side_inputs_on_real_processes_are_those_of_a_simulation(real, alone):
    losses, _ = merged(compared("side inputs", real))
    assert losses != train(0, SIDE["side inputs"] | {"simulated": True, "samples": Samples})[0]


def assert_gradients_of(model, kept):
    """Check the gradients by (stage, name) against those of the unsplit model."""
    for index, layer in enumerate(model):
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(kept[index, name], parameter.grad, rtol=1e-5, atol=1e-7)


def keep_gradients(trainer):
    """Gradients by (stage, name) as the optimizers find them, before they are cleared."""
    kept = {}
    update = trainer.update.step

    def keeping(*given):
        for stage in trainer.stages:
            for name, parameter in stage.submod.named_parameters():
                kept[stage.stage_index, name] = parameter.grad.clone()
        return update(*given)

    trainer.update.step = keeping
    return kept


def test_the_clipped_norm_is_that_of_all_stages(alone):
    trainer = make_trainer(0, num_stages=3, simulated=True, steps=1, optimizer={"lr": 0.0, "max_grad_norm": 1e-3})
    kept, records = keep_gradients(trainer), []
    trainer.train(records.append)
    whole = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in kept.values()]).double())
    assert records[0].grad_norm == pytest.approx(float(whole), rel=1e-12)


@pytest.mark.processes
def test_frames_are_as_many_and_as_long_as_planned(real):
    forward = real[0]["gpipe"][2][0][0, "activations", "train"]
    backward = real[1]["gpipe"][2][1][0, "gradients", "train"]
    elements = 2 * 3 * 12
    rows = 2 * 3
    assert (forward.frames, backward.frames) == (12, 12)
    assert forward.bytes == 12 * (64 + elements // 2 + 2 * rows)
    assert backward.bytes == 12 * (64 + elements + 2 * rows)
    assert forward.uncompressed == backward.uncompressed == 12 * 4 * elements
