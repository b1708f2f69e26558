"""Batch norms of replicas: each gathers statistics of its own samples, and all take the mean with the weights."""

import pytest
import torch
from torch import nn

from support.toy import Samples, Scaled, make_trainer, unsplit
from support.toy_runs import equal_to_a_simulation, stop_and_resume
from thinwire.models.batch_norm import running_statistics
from thinwire.models.layers import Stage

NONE = {"activations": "none", "gradients": "none"}
NORMED = {"norm": True, "microbatches": 2, "microbatch_size": 2, "accumulation": 2, "compression": NONE}
EVERY_THREE = {"every": 3, "lr": 1.0, "momentum": 0.0}


def statistics_in(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items() if "running" in name or "num" in name}


def of_stages(trainer):
    return {
        f"{stage.stage_index}.{name}": tensor
        for stage in trainer.stages
        for name, tensor in statistics_in(stage.submod).items()
    }


def test_all_replicas_take_the_mean_of_what_each_one_gathered(alone):
    """Restated: every replica is an unsplit model with the first weights, which sees its own micro-batches in order."""
    models = [unsplit(2, norm=True) for _ in range(3)]
    for replica, model in enumerate(models):
        first = 8 * replica
        for ids in (torch.arange(first, first + 8) % 16).chunk(4):
            model(Samples().inputs(ids, 0))
    trainer = make_trainer(0, **NORMED, replicas=3, simulated=True)
    trainer.train_step(0)
    found, gathered = of_stages(trainer), [statistics_in(model) for model in models]
    assert found.keys() == gathered[0].keys() and len(found) == 6
    for name, got in found.items():
        wanted = sum(each[name] for each in gathered) / 3
        torch.testing.assert_close(got.double(), wanted.double(), rtol=1e-5, atol=1e-6)
    assert not torch.equal(gathered[0]["0.layers.0.row.2.running_mean"], gathered[1]["0.layers.0.row.2.running_mean"])


@pytest.mark.processes
@pytest.mark.parametrize(
    "options",
    [{"exchange": "ef(q(4))"}, {"steps": 8, "depth": 2, "sync": EVERY_THREE | {"every": 4}}],
    ids=["every step", "every 4 steps"],
)
def test_a_simulation_of_batch_norms_equals_the_processes_bit_for_bit(options, alone):
    """All weights and statistics are equal in both replicas of a stage, too."""
    equal_to_a_simulation(4, NORMED | {"replicas": 2} | options)


@pytest.mark.slow
def test_between_two_exchanges_the_modules_hold_the_statistics_of_the_last_one(alone):
    trainer = make_trainer(0, **NORMED, replicas=2, simulated=True, steps=8, sync=EVERY_THREE)
    seen = []
    trainer.train(lambda record: seen.append(of_stages(trainer)["1.layers.0.row.2.running_var"]))
    changed = [step for step in range(1, 8) if not torch.equal(seen[step], seen[step - 1])]
    assert changed == [2, 5, 7] and torch.equal(seen[0], torch.ones(3))


@pytest.mark.slow
@pytest.mark.parametrize("sync", [{}, EVERY_THREE], ids=["each", "rarely"])
def test_a_stop_changes_no_statistics(alone, tmp_path, sync):
    options = NORMED | {"replicas": 2, "simulated": True, "steps": 7, "sync": sync}
    whole = make_trainer(0, **options)
    wanted = [whole.train_step(step).loss for step in range(7)]
    before, _, again = stop_and_resume(tmp_path, 4, options)
    assert before + [again.train_step(step).loss for step in range(4, 7)] == wanted
    found = of_stages(again)
    assert all(torch.equal(tensor, found[name]) for name, tensor in of_stages(whole).items())


def test_frames_of_statistics_count_as_traffic_between_replicas_of_their_own(alone):
    """Their 32 bits an element counted as those of the codec of the gradients."""

    def sent(norm):
        trainer = make_trainer(0, **NORMED | {"norm": norm}, replicas=2, simulated=True)
        trainer.train_step(0)
        return trainer.stages[1].meter

    with_norms, without = sent(norm=True), sent(norm=False)
    traffic = with_norms.sent[1, "statistics", "train"]
    assert (traffic.frames, traffic.bytes) == (2, 2 * (64 + 4 * 512)), "a row from each replica to the other"
    assert with_norms.sent[1, "parts", "train"] == without.sent[1, "parts", "train"], "weights of a norm fill up a row"
    assert with_norms.exchanged - without.exchanged == 2 * traffic.bytes


def test_statistics_that_are_updated_in_training_are_found_by_name():
    found = running_statistics(
        Stage([Scaled(nn.BatchNorm1d(2), nn.BatchNorm1d(2).eval(), nn.InstanceNorm1d(2), nn.Linear(2, 2))])
    )
    assert list(found) == ["0.running_mean", "0.running_var", "0.num_batches_tracked"]
    assert running_statistics(Stage([Scaled(nn.BatchNorm1d(2, track_running_stats=False))])) == {}
