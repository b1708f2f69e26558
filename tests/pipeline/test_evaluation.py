from itertools import product
from math import nan

import pytest
import torch

from support.processes import left_by_the_first, outcomes_of, run
from support.toy import Samples, Task, make_trainer, needs_inference, unsplit
from thinwire.pipeline import evaluation
from thinwire.pipeline.errors import EvaluationStoppedError, PeerError
from thinwire.pipeline.evaluation import advice, evaluate, look
from thinwire.pipeline.options.compression import BoundaryOptions


class Padded:
    def __init__(self, ids, valid):
        self.epoch, self.ids, self.valid = 0, torch.tensor(ids), torch.tensor(valid)


def batches():
    return [
        Padded([1, 2, 3, 4, 5, 6, 7, 8], [True] * 8),
        Padded([9, 11, 12, 1, 2, 3, 4, 6], [True] * 3 + [False] * 5),
    ]


def test_both_scores_are_means_over_the_valid_targets_of_real_samples(alone):
    trainer = make_trainer(
        0, num_stages=2, simulated=True, dropout=0.5, compression={"activations": "q(1)", "gradients": "q(8)"}
    )
    scores = evaluate(trainer, Samples(), batches)
    ids = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12])
    model, samples, task = unsplit(2, dropout=0.5).eval(), Samples(), Task()
    targets = samples.targets(ids)
    with torch.no_grad():
        output = model(samples.inputs(ids, 0))
        expected = task.loss_sum(output, targets) / task.num_valid(targets)
    assert scores["off"].num_targets == scores["on"].num_targets == task.num_valid(targets)
    assert scores["off"].loss == pytest.approx(expected.item(), rel=1e-6)
    assert scores["off"].metrics == {"correct": float(task.observe(output, targets))}
    assert abs(scores["on"].loss - expected.item()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activations", "gradients"),
    [("none", "none"), ("aqsgd(topk(0.25))", "reuse"), ("ef21(q(4))", "ef(topk(0.25))")],
)
def test_evaluation_changes_nothing_of_training(activations, gradients, alone):
    compression = {"activations": activations, "gradients": gradients}

    def losses(evaluating):
        trainer = make_trainer(0, num_stages=2, simulated=True, dropout=0.5, steps=5, compression=compression)
        found = []

        def after_step(record):
            found.append(record.loss)
            if evaluating:
                evaluate(trainer, Samples(), batches)

        trainer.train(after_step)
        return found

    assert losses(True) == losses(False)


def test_compression_is_on_again_after_an_evaluation_that_failed(alone):
    """Nothing of it is left: a pass that nobody announces evaluates with compression on."""
    trainer = make_trainer(0, num_stages=2, simulated=True)

    def broken():
        yield batches()[0]
        raise KeyError

    with pytest.raises(KeyError):
        evaluate(trainer, Samples(), broken)
    sent = trainer.stages[0].meter.sent
    assert (0, "activations", "eval-off") not in sent
    before = sent[0, "activations", "eval-on"].frames
    with torch.no_grad():
        trainer.runner.schedule.eval(Samples().inputs(torch.arange(8), 0), target=Samples().targets(torch.arange(8)))
    assert sent[0, "activations", "eval-on"].frames == before + 4


def test_each_batch_takes_the_slots_of_the_replica_that_scores_it(alone, monkeypatch):
    """In a simulation all took those of the first replica, and scored other losses than processes do."""
    trainer = make_trainer(
        0, num_stages=2, simulated=True, replicas=2, accumulation=3, microbatches=2, microbatch_size=4, steps=1
    )
    begun, run = [], trainer.runner.run
    monkeypatch.setattr(
        trainer.runner, "run", lambda coming, *rest: begun.append(coming.accumulation) or run(coming, *rest)
    )
    evaluate(trainer, Samples(), lambda: [*batches(), *batches()])
    assert begun == 2 * [0, 3, 0, 3]


def test_without_batches_there_is_no_score(alone):
    scores = evaluate(make_trainer(0, num_stages=2, simulated=True), Samples(), list)
    assert all(score.num_targets == 0 and score.loss != score.loss for score in scores.values())


def test_modules_are_in_the_mode_of_what_runs(alone):
    trainer = make_trainer(0, num_stages=2, simulated=True, dropout=0.5)
    modes = []
    for _ in range(2):
        trainer.train_step(0)
        modes += [{module.training for stage in trainer.stages for module in stage.submod.modules()}]
        evaluate(trainer, Samples(), batches)
        modes += [{module.training for stage in trainer.stages for module in stage.submod.modules()}]
    assert modes == [{True}, {False}] * 2


def evaluated_alone(rank):
    """What process 1 says in its first evaluation, after process 0 has left."""
    trainer = make_trainer(rank, num_stages=2)
    left_by_the_first(rank)
    with pytest.raises(PeerError) as caught:
        evaluate(trainer, Samples(), batches)
    return str(caught.value)


@needs_inference
@pytest.mark.processes
def test_a_stage_that_is_lost_in_the_first_evaluation_is_named_by_its_neighbour():
    """torch asks all stages for examples first; its traceback made the neighbour the one that failed."""
    returned, told = outcomes_of(evaluated_alone, 2)[1]
    assert returned, told
    assert told.startswith("stage 1 was asking whether all stages have examples: "), told


def stopped(rank):
    """Whether an evaluation ends in both processes when one is asked to stop, and what it leaves."""
    trainer, seen = make_trainer(rank, num_stages=2), []

    def seeing():
        for batch in batches():
            seen.append(batch)
            yield batch

    before = [dict(stage.passes) for stage in trainer.stages]
    with pytest.raises(EvaluationStoppedError):
        evaluate(trainer, Samples(), seeing, lambda: rank == 0)
    stage = trainer.stages[0]
    return len(seen), [dict(stage.passes) for stage in trainer.stages] == before, stage.meter.sent


@pytest.mark.processes
def test_an_evaluation_ends_in_all_processes_after_the_batch_under_way_and_counts_for_nothing():
    assert run(stopped, 2) == [(1, True, {})] * 2


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["q(1, round='stochastic')", "aqsgd(q(1))", "ef21(q(1))"])
def test_a_look_before_training_changes_nothing_that_comes_after(codec, alone, monkeypatch):
    """No pass counts, which random numbers depend on, and AQ-SGD has visited no held-out sample."""
    monkeypatch.setattr(evaluation, "TOO_MUCH", -1.0)  # so each boundary is scored alone as well

    def everything(looks):
        trainer = make_trainer(0, num_stages=3, simulated=True, compression={"activations": codec})
        found = look(trainer, Samples(), batches) if looks else None
        assert found is None or set(found.alone) == {0, 1}
        assert not any(stage.digests() for stage in trainer.stages)
        losses = []
        trainer.train(lambda record: losses.append(record.loss))
        scores = [evaluate(trainer, Samples(), batches) for _ in range(2)]
        return losses, scores, [stage.digests() for stage in trainer.stages], [stage.passes for stage in trainer.stages]

    assert everything(True) == everything(False)


@pytest.mark.slow
def test_a_look_scores_the_first_batch_and_each_boundary_alone_where_all_cost_too_much(alone, monkeypatch):
    def trainer_with(*activations):
        boundaries = {i: BoundaryOptions(activations=codec) for i, codec in enumerate(activations)}
        return make_trainer(0, num_stages=3, simulated=True, compression={"boundaries": boundaries})

    def first():
        return batches()[:1]

    scores = {
        codecs: evaluate(trainer_with(*codecs), Samples(), first) for codecs in product(("q(1)", "none"), repeat=2)
    }
    assert len({each["on"].loss for each in scores.values()}) == 4, "each codec changes the loss"
    found = look(trainer_with("q(1)", "q(1)"), Samples(), batches)
    assert found.scores == scores["q(1)", "q(1)"] and found.alone == {}
    monkeypatch.setattr(evaluation, "TOO_MUCH", -1.0)
    trainer = trainer_with("q(1)", "q(1)")
    found = look(trainer, Samples(), batches)
    assert found.alone == {0: scores["q(1)", "none"]["on"], 1: scores["none", "q(1)"]["on"]}
    assert evaluate(trainer, Samples(), first) == scores["q(1)", "q(1)"], "nothing is bypassed any more"


def looked(rank, simulated=False):
    """What a look says that scores each boundary alone; None in processes that do not report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "TOO_MUCH", -1.0)
        trainer = make_trainer(rank, num_stages=3, simulated=simulated, compression={"activations": "q(1)"})
        return look(trainer, Samples(), batches)


@pytest.mark.processes
@pytest.mark.slow
def test_a_look_of_processes_is_that_of_a_simulation(alone):
    simulated = looked(0, simulated=True)
    assert set(simulated.alone) == {0, 1}
    assert run(looked, 3) == [None, None, simulated]


def test_codecs_cost_too_much_above_five_percent_of_the_loss():
    """The sentence is the same before training, after an evaluation and in an export."""
    assert advice(3.15, 3.0) is None and advice(2.0, 3.0) is None and advice(nan, nan) is None
    codecs = "q(8, step=0.2, codebook=4096) and q(8, step=0.1, codebook=4096)"
    milder = f"milder for activations of pretrained models are {codecs}"
    said = "the codecs cost too much: the held-out loss is {} with compression and 3.0000 without"
    assert advice(3.1501, 3.0) == f"{said.format('3.1501')}; {milder}"
    assert advice(nan, 3.0) == f"{said.format('nan')}; {milder}"
    assert advice(9.0, 3.0, {0: 3.1, 1: 8.5}) == (
        f"{said.format('9.0000')}; boundary 1 alone is at fault, with 8.5000 by itself; {milder}"
    )
    assert advice(9.0, 3.0, {0: 8.0, 1: 8.5}) == f"{said.format('9.0000')}; {milder}", "both are"
    assert advice(9.0, 3.0, {0: 9.0}) == f"{said.format('9.0000')}; {milder}", "there is no other"
