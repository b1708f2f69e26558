"""Replicas that step alone: DiLoCo's arithmetic, equal replicas, and stops between two exchanges."""

from functools import partial

import pytest
import torch
from torch.nn import Parameter
from torch.nn.functional import cross_entropy

from support.toy import IGNORE, Samples, make_trainer, row_of, unsplit
from support.toy_runs import assert_trains_to, checkpoints_of, stop_and_resume
from thinwire.pipeline.errors import NonFiniteError, OptionsError
from thinwire.pipeline.options import ReplicaOptions, SyncOptions
from thinwire.pipeline.replicas import exchange
from thinwire.pipeline.replicas.lane import LaneEnds
from thinwire.pipeline.replicas.local_steps import StageCopies
from thinwire.pipeline.saving.checkpoint_folder import manifests
from thinwire.pipeline.training.training_state import resume

EVERY, STEPS = 3, 8
NONE = {"activations": "none", "gradients": "none"}
STATEFUL = {"activations": "aqsgd(q(4))", "gradients": 'ef(q(6, round="stochastic"))'}
PUBLISHED = 'ef(topk(0.015625, values="means(2)", code="entropy"), decay=0.95)'
"""The codec of SparseLoCo."""
OPTIONS = {"microbatches": 2, "microbatch_size": 2, "simulated": True, "steps": STEPS}


def diloco(replicas, outer, optimizer):
    """DiLoCo restated: every replica an unsplit model; the common weights after all steps, and each step's loss."""
    common = [parameter.detach().clone() for parameter in unsplit(2).parameters()]
    momenta = [torch.zeros_like(weights) for weights in common]
    models = [unsplit(2) for _ in range(replicas)]
    inner = [
        torch.optim.SGD(model.parameters(), lr=optimizer["lr"], momentum=optimizer["momentum"]) for model in models
    ]
    samples, size, losses = Samples(), 4, []
    for step in range(STEPS):
        for replica, model in enumerate(models):
            first = (step * replicas + replica) * size
            ids = torch.arange(first, first + size) % 16
            targets = samples.targets(ids)
            total = cross_entropy(
                model(samples.inputs(ids, 0)).flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
            )
            loss = total / (targets != IGNORE).sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer["max_grad_norm"])
            inner[replica].step()
            inner[replica].zero_grad()
            losses += [float(loss.detach())] if replica == 0 else []
        if (step + 1) % EVERY == 0 or step + 1 == STEPS:
            every = list(zip(*(model.parameters() for model in models), strict=True))
            for weights, momentum, theirs in zip(common, momenta, every, strict=True):
                moves = [weights - own.detach() for own in theirs]
                moved = sum(moves) / replicas
                momentum.mul_(outer["momentum"]).add_(moved)
                weights -= outer["lr"] * (outer["momentum"] * momentum + moved)
                for own in theirs:
                    own.data.copy_(weights)
    return common, losses


@pytest.mark.slow
@pytest.mark.parametrize("outer", [{"lr": 0.7, "momentum": 0.9}, {"lr": 1.0, "momentum": 0.0}])
def test_it_is_diloco(alone, outer):
    optimizer = {"name": "sgd", "lr": 0.2, "momentum": 0.9, "max_grad_norm": 0.5, "schedule": "constant"}
    common, losses = diloco(3, outer, optimizer)
    exchanging = {"replicas": 3, "sync": {"every": EVERY, **outer}}
    trainer = make_trainer(0, **OPTIONS, **exchanging, compression=NONE, optimizer=optimizer)
    records = assert_trains_to(trainer, common, losses)
    exchanged = [record.step for record in records if record.exchanged]
    assert exchanged == [2, 5, 7], "every three steps, and at the end"


def test_between_two_exchanges_the_modules_hold_the_weights_of_the_last_one(alone):
    trainer = make_trainer(0, **OPTIONS, replicas=2, sync={"every": EVERY})
    weight = row_of(trainer.stages[0])[0].weight
    seen = []
    trainer.train(lambda record: seen.append(weight.clone()))
    changed = [step for step in range(1, STEPS) if not torch.equal(seen[step], seen[step - 1])]
    assert changed == [2, 5, 7]


@pytest.mark.parametrize(
    ("options", "timeout", "seconds"),
    [
        ({"count": 2}, 300.0, 300.0),
        ({"count": 1}, 300.0, 300.0),
        ({"count": 2, "sync": SyncOptions(every=9)}, 300.0, 2700.0),
        ({"count": 2, "sync": SyncOptions(every=500)}, 300.0, 86400.0),
        ({"count": 2, "sync": SyncOptions(every=9)}, 1e6, 1e6),
    ],
)
def test_a_replica_waits_for_all_the_steps_in_which_another_may_fall_behind(options, timeout, seconds):
    """At 2 s a step here and 2.7 there, 500 steps are a wait of 350 s."""
    assert ReplicaOptions(**options).longest_wait(timeout) == seconds


def test_frames_between_exchanges_are_waited_for_so_long(alone, monkeypatch):
    waits = []

    class Recorded(LaneEnds):
        def __init__(self, here, group, num_stages, timeout, times):
            super().__init__(here, group, num_stages, timeout, times)
            waits.append(timeout.total_seconds())

    monkeypatch.setattr(exchange, "LaneEnds", Recorded)
    for every in (1, EVERY):
        make_trainer(0, **OPTIONS, replicas=2, sync={"every": every})
    assert waits == [60, EVERY * 60]


@pytest.mark.parametrize(("every", "whose"), [(1, "gradients"), (EVERY, "outer gradients")])
def test_what_is_not_finite_is_named(alone, every, whose):
    trainer = make_trainer(0, **OPTIONS, replicas=2, sync={"every": every})
    for step in range(every - 1):
        trainer.train_step(step)
    row_of(trainer.stages[1])[0].bias.register_hook(lambda gradient: gradient * float("nan"))
    said = f"^replica 0 of stage 1 has NaN or infinity in the {whose} of the weights"
    with pytest.raises(NonFiniteError, match=said):
        trainer.train_step(every - 1)


def finished(trainer, first=0):
    losses = [trainer.train_step(step).loss for step in range(first, STEPS)]
    weights = [parameter.tolist() for stage in trainer.stages for parameter in stage.submod.parameters()]
    return losses, weights, [stage.meter.sent for stage in trainer.stages]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [4, 6])
@pytest.mark.parametrize("exchange", ["ef(topk(0.05))", PUBLISHED])
def test_a_stop_between_two_exchanges_changes_nothing(alone, tmp_path, stop, exchange):
    options = OPTIONS | {
        "replicas": 2,
        "dropout": 0.2,
        "sync": {"every": EVERY},
        "exchange": exchange,
        "compression": STATEFUL,
    }
    wanted = finished(make_trainer(0, **options))
    before, _, again = stop_and_resume(tmp_path, stop, options)
    losses, *rest = finished(again, stop)
    assert (before + losses, *rest) == wanted


def test_a_run_whose_last_step_is_done_already_ends_with_an_exchange(alone, tmp_path):
    """It stopped between two exchanges, and goes on with as many steps as are done."""
    options = OPTIONS | {"replicas": 2, "sync": {"every": EVERY}, "optimizer": {"schedule": "constant"}}
    _, stopped, _ = stop_and_resume(tmp_path, 7, options)
    whole, again = (make_trainer(0, **options | {"steps": 7}) for _ in range(2))
    whole.train(lambda record: None)
    resume(again, checkpoints_of(tmp_path), manifests(tmp_path)[-1])
    again.train(lambda record: pytest.fail("no step is left"), first=7)
    wanted, found, old = (
        [each for stage in one.stages for each in stage.submod.parameters()] for one in (whole, again, stopped)
    )
    assert all(map(torch.equal, found, wanted)) and not any(map(torch.equal, found, old))
    again.train(lambda record: None, first=7)
    assert all(map(torch.equal, found, wanted)), "once is enough"


class Part:
    """One part of a checkpoint, which notes what is read of it."""

    def __init__(self, tensors):
        self.saved, self.read = tensors, []

    def names(self, prefix):
        return [name.removeprefix(prefix) for name in self.saved if name.startswith(prefix)]

    def tensors(self, prefix, wanted=None):
        names = [name for name in self.names(prefix) if wanted is None or name in wanted]
        self.read += names
        return {name: self.saved[prefix + name] for name in names}


def test_a_stage_of_another_cut_reads_what_is_its_own():
    make_optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    parameters = {name: Parameter(torch.ones(3)) for name in ("first", "second")}
    whole = StageCopies(parameters, [0, 1], make_optimizer, SyncOptions(every=EVERY))
    for replica in (0, 1):
        whole.use(replica)
        for parameter in parameters.values():
            parameter.grad = torch.full((3,), replica + 1.0)
        whole.optimizers[replica].step()
    saved = whole.state_dict()
    part = Part({f"replicas/{name}": tensor for name, tensor in saved.items()})
    half = StageCopies({"second": Parameter(torch.ones(3))}, [0, 1], make_optimizer, SyncOptions(every=EVERY))
    half.load_state_dict([part])
    assert sorted(part.read) == ["second", "second", "second/momentum_buffer", "second/momentum_buffer"]
    got = half.state_dict()
    assert got.keys() == {name for name in saved if "second" in name}
    assert all(torch.equal(tensor, saved[name]) for name, tensor in got.items())


class Counting(torch.optim.SGD):
    """As some of bitsandbytes and transformers, it counts its steps in a number of Python."""

    def step(self):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1


def test_numbers_that_the_optimizer_of_a_replica_keeps_come_back():
    def made():
        return StageCopies(
            {"weight": Parameter(torch.ones(3))}, [0], partial(Counting, lr=0.1), SyncOptions(every=EVERY)
        )

    stopped, again = made(), made()
    optimizer = stopped.optimizers[0]
    optimizer.step()
    optimizer.step()
    again.load_state_dict([Part({f"replicas/{name}": tensor for name, tensor in stopped.state_dict().items()})])
    [kept] = again.optimizers[0].state.values()
    assert kept == {"step": 2}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "replicas.sync.every must be from 1 to 1000000000, got 0"),
        ({"lr": 0.0}, "replicas.sync.lr must be above 0 and at most 1e+30, got 0.0"),
        ({"momentum": 1.0}, "replicas.sync.momentum must be at least 0 and below 1, got 1.0"),
        (
            {"every": 1, "lr": 1.0, "momentum": 0.0},
            "replicas.sync.every must be above 1 for replicas.sync.lr 1.0 and momentum 0.0: with 1, replicas "
            "add up their gradients in each step, and have no outer optimizer; raise it, or drop lr and momentum",
        ),
    ],
)
def test_what_cannot_work_is_one_sentence(options, said):
    with pytest.raises(OptionsError) as caught:
        SyncOptions(**options)
    assert list(caught.value.mistakes) == [said]
