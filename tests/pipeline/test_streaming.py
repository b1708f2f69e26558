"""Streaming DiLoCo: groups of layers exchanged in turn, hidden behind steps, and mixed into each replica's weights."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from support.processes import run
from support.toy import IGNORE, Samples, make_trainer, unsplit
from support.toy_runs import assert_trains_to, equal_to_a_simulation, stop_and_resume
from thinwire.models.layers import Layer, Stage
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.options import SyncOptions
from thinwire.pipeline.replicas.groups import divide_layers, due

STEPS, DEPTH = 11, 2
SENT = {3: [0], 6: [1], 9: [0], 11: [0, 1]}
"""The groups that are sent after each step, with every = 6 and two groups."""
NONE = {"activations": "none", "gradients": "none"}
OPTIONS = {"microbatches": 2, "microbatch_size": 2, "simulated": True, "steps": STEPS, "depth": DEPTH}
PUBLISHED = 'ef(topk(0.015625, values="means(2)", code="entropy"), decay=0.95)'
EXCHANGES = {
    "ef(q(4))": {"sums": "owner"},
    PUBLISHED: {"sums": "all", "lr": 1.0, "momentum": 0.0},
    "powersgd(1)": {"sums": "owner"},
}


def streaming(replicas, overlap, alpha, optimizer):
    """Algorithm 2 of 2501.18512 restated, two groups, every replica an unsplit model: the common weights, and losses.

    Layer 0 of each stage is group 0, and layer 1 group 1. The last step exchanges all that has not just arrived.
    """

    def make():
        return unsplit(2, depth=DEPTH)

    common = [parameter.detach().clone() for parameter in make().parameters()]
    momenta = [torch.zeros_like(weights) for weights in common]
    models = [make() for _ in range(replicas)]
    inner = [torch.optim.SGD(model.parameters(), lr=optimizer["lr"], momentum=0.9) for model in models]
    own = list(zip(*(model.parameters() for model in models), strict=True))
    fragments = {0: [0, 1, 4, 5], 1: [2, 3, 6, 7]}
    samples, size, losses, sent = Samples(), 4, [], {}

    def send(group):
        sent[group] = [sum(common[i] - each.detach() for each in own[i]) / replicas for i in fragments[group]]

    def receive(group):
        for i, moved in zip(fragments[group], sent.pop(group), strict=True):
            momenta[i].mul_(0.9).add_(moved)
            common[i] -= 0.7 * (0.9 * momenta[i] + moved)
            for each in own[i]:
                each.data = alpha * each.data + (1 - alpha) * common[i]

    for done in range(1, STEPS + 1):
        for replica, model in enumerate(models):
            first = ((done - 1) * replicas + replica) * size
            ids = torch.arange(first, first + size) % 16
            targets = samples.targets(ids)
            total = cross_entropy(
                model(samples.inputs(ids, 0)).flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
            )
            loss = total / (targets != IGNORE).sum()
            inner[replica].zero_grad()
            loss.backward()
            inner[replica].step()
            losses += [float(loss.detach())] if replica == 0 else []
        arrived = [group for group in list(sent) if done == STEPS or group in SENT.get(done - overlap, ())]
        for group in arrived:
            receive(group)
        for group in fragments:
            if group in SENT.get(done, ()) and group not in arrived:
                send(group)
                if done == STEPS or not overlap:
                    receive(group)
    return common, losses


@pytest.mark.parametrize(("overlap", "alpha"), [(0, 0.0), (1, 0.0), (2, 0.5)])
def test_it_is_streaming_diloco(alone, overlap, alpha):
    optimizer = {"name": "sgd", "lr": 0.2, "momentum": 0.9, "schedule": "constant"}
    common, losses = streaming(3, overlap, alpha, optimizer)
    sync = {"every": 6, "groups": 2, "overlap": overlap, "alpha": alpha}
    trainer = make_trainer(0, **OPTIONS, replicas=3, sync=sync, compression=NONE, optimizer=optimizer)
    assert_trains_to(trainer, common, losses)


@pytest.mark.processes
def test_a_simulation_equals_the_processes_bit_for_bit(alone):
    sync = {"every": 4, "groups": 2, "overlap": 1, "alpha": 0.5}
    options = OPTIONS | {"replicas": 2, "sync": sync, "exchange": "ef(q(4))", "dropout": 0.2}
    equal_to_a_simulation(4, options)


def weights_of(trainer):
    return [parameter.tolist() for stage in trainer.stages for parameter in stage.submod.parameters()]


def weights_of_two(rank, options, other):
    """Two trainers of one process: the second one trains while an exchange of the first one is under way."""
    first = make_trainer(rank, **options)
    second = make_trainer(rank, where=first.placement, **options | other)
    for trainer, steps in ((first, range(4)), (second, range(6)), (first, range(4, 6))):
        for step in steps:
            trainer.train_step(step)
    return weights_of(first), weights_of(second)


@pytest.mark.processes
def test_two_trainers_of_a_process_do_not_take_each_others_frames(alone):
    """The second one sends its sums before the first one does, in frames with the same header."""
    options = OPTIONS | {"num_stages": 1, "replicas": 2, "sync": {"every": 4, "overlap": 1}}
    other, wanted = {"optimizer": {"lr": 0.02}}, []
    for own in ({}, other):
        trainer = make_trainer(0, **options | own)
        for step in range(6):
            trainer.train_step(step)
        wanted.append(weights_of(trainer))
    replicas = run(weights_of_two, 2, options | {"simulated": False}, other)
    assert [list(each) for each in replicas] == [wanted, wanted]


def test_the_most_bytes_of_a_step_fall_with_the_groups(alone):
    """The 52 layers of a stage fill two rows, or one row of each group."""
    most, total = {}, {}
    for groups in (1, 2):
        sync = {"every": 4, "groups": groups, "overlap": 1}
        options = OPTIONS | {"steps": 8, "depth": 52, "replicas": 2, "sync": sync, "exchange": "ef(q(4))"}
        trainer = make_trainer(0, **options)
        known = [each for step in range(5) for each in trainer.train_step(step).exchanged]
        exchanged = [sum(stage.bytes for stage in each.stages) for each in [*known, *trainer.sync.exchanges.settle()]]
        most[groups], total[groups] = max(exchanged), sum(exchanged)
    assert most[1] == 2 * most[2]
    assert total[1] == total[2], "one exchange of everything, or of both groups"


def finished(trainer, first=0):
    losses = [trainer.train_step(step).loss for step in range(first, STEPS)]
    return losses, weights_of(trainer), [stage.meter.sent for stage in trainer.stages]


@pytest.mark.parametrize(("exchange", "stop"), [("ef(q(4))", 4), (PUBLISHED, 5), ("powersgd(1)", 7)])
def test_a_stop_while_an_exchange_is_under_way_changes_nothing(alone, tmp_path, exchange, stop):
    sync = {"every": 6, "groups": 2, "overlap": 2, "alpha": 0.5} | EXCHANGES[exchange]
    options = OPTIONS | {"replicas": 2, "dropout": 0.2, "sync": sync, "exchange": exchange}
    wanted = finished(make_trainer(0, **options))
    before, stopped, again = stop_and_resume(tmp_path, stop, options)
    losses, *rest = finished(again, stop)
    assert (before + losses, *rest) == wanted
    after, *rest = finished(stopped, stop)
    assert (before + after, *rest) == wanted, "to write a checkpoint changes nothing"


def test_groups_are_equally_large_and_take_turns():
    stage = nn.Sequential(nn.Linear(4, 40), *(nn.Linear(8, 8) for _ in range(4)), nn.Tanh())
    groups = [sorted({name[0] for name in group}) for group in divide_layers(stage, 2)]
    assert groups == [["0", "4"], ["1", "2", "3"]]
    sync = SyncOptions(every=7, groups=3)
    assert [due(sync, done) for done in range(1, 15)] == [[], [0], [], [1], [], [], [2]] * 2
    assert [done for done in range(1, 10) if due(SyncOptions(every=3), done)] == [3, 6, 9]


class Parts(Layer):
    """A layer of modules by their names in the unsplit model."""

    def __init__(self, **parts):
        super().__init__()
        self.parts = parts


def test_weights_that_stages_share_count_in_the_first_group():
    """They were counted nowhere. So one group had nearly everything, or all, and the other nothing."""
    layers = [Parts(embedding=nn.Linear(8, 8)), *(Parts(**{name: nn.Linear(4, 4)}) for name in ("one", "two"))]
    groups = divide_layers(Stage(layers, shared=["embedding"]), 2)
    assert [sorted({name.partition(".")[0] for name in group}) for group in groups] == [["embedding"], ["one", "two"]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"every": 4, "groups": 5},
            "replicas.sync.groups must be from 1 to replicas.sync.every, 4, because no two groups are exchanged after "
            "the same step; got 5",
        ),
        ({"every": 4, "alpha": 1.0}, "replicas.sync.alpha must be at least 0 and below 1, got 1.0"),
        (
            {"every": 30, "groups": 4, "overlap": 7},
            "replicas.sync.overlap must be from 0 to 6, because one group travels at a time, and exchanges are 7 steps "
            "apart (every 30 / groups 4); got 7",
        ),
    ],
)
def test_what_cannot_work_is_one_sentence(options, said):
    with pytest.raises(OptionsError) as caught:
        SyncOptions(**options)
    assert list(caught.value.mistakes) == [said]
