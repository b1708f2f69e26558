"""Training as the unsplit model does it: the loss of a batch, what each pass is, and what a step reports."""

import math
import time

import pytest
import torch
from torch import nn

from support import toy
from support.toy import Samples, Task, make_trainer, unsplit
from thinwire.models.layers import Stage
from thinwire.pipeline.measuring.meters import Meter
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.training.optimization import WholeBatchLoss
from thinwire.pipeline.training.sync import StepAlone, Sync

UNCOMPRESSED = {"activations": "none", "gradients": "none"}
PLAIN_SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.0, "schedule": "constant"}


def batch(step=0, size=8):
    return (torch.arange(size) + step * size) % 16


def loss_of(model, ids):
    """The mean over all valid targets of a batch."""
    samples, task = Samples(), Task()
    targets = samples.targets(ids)
    return task.loss_sum(model(samples.inputs(ids, 0)), targets) / task.num_valid(targets)


def test_shares_of_micro_batches_add_up_to_the_mean_of_the_batch():
    """The mean of micro-batches' means is another number, for they have other numbers of valid targets."""
    model, samples, task = unsplit(2), Samples(), Task()
    ids, loss = batch(), WholeBatchLoss(Task(), Meter())
    targets = samples.targets(ids)
    outputs = model(samples.inputs(ids, 0))
    loss.begin(task.num_valid(targets))
    pairs = list(zip(outputs.chunk(4), targets.chunk(4), strict=True))
    shares = [loss(output, target).item() for output, target in pairs]
    assert sum(shares) == pytest.approx(loss_of(model, ids).item(), rel=1e-6)
    means = [task.loss_sum(output, target).item() / max(1, task.num_valid(target)) for output, target in pairs]
    assert abs(sum(means) / 4 - sum(shares)) > 1e-3


def test_a_batch_without_valid_targets_loses_nothing():
    loss = WholeBatchLoss(Task(), Meter())
    loss.begin(0)
    assert loss(torch.zeros(2, 3, 12), torch.full((2, 3), -100)).item() == 0


def test_what_the_task_observes_goes_where_it_was_asked_for():
    loss, output, target = WholeBatchLoss(Task(), Meter()), torch.eye(12)[None, :3], torch.tensor([[0, 1, 5]])
    observed = []
    loss.begin(1, observed)
    loss(output, target)
    assert [float(count) for count in observed] == [2.0]
    loss.begin(1)
    loss(output, target)
    assert len(observed) == 1


class Added(nn.Module):
    """Multiplies by the sum of two parameters, as they are or as views."""

    def __init__(self, *, views):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.linspace(-1, end, toy.WIDTH)) for end in (1, 2))
        self.views = views

    def forward(self, x):
        return x * (self.a.view(-1) + self.b.view(-1) if self.views else self.a + self.b)


@pytest.mark.parametrize(
    ("schedule", "views"), [("gpipe", True), ("interleaved-zero-bubble", False), ("zbv-zero-bubble", True)]
)
def test_parameters_that_are_added_have_the_gradients_of_the_unsplit_model(schedule, views, alone, monkeypatch):
    """torch gives both one memory; those of the second micro-batch were added twice, and clipping scaled twice."""

    def module(index, dropout=0.0, depth=1, norm=False):
        torch.manual_seed(index)
        return Stage([toy.Scaled(nn.Linear(toy.WIDTH, toy.WIDTH), Added(views=views), nn.Tanh())])

    monkeypatch.setattr(toy, "module", module)
    trainer = make_trainer(
        0,
        num_stages=2 if schedule == "gpipe" else 4,
        schedule=schedule,
        simulated=True,
        compression=UNCOMPRESSED,
        optimizer={**PLAIN_SGD, "max_grad_norm": 0.1},
    )
    model = nn.Sequential(*(module(index) for index in range(len(trainer.stages))))
    trainer.train_step(0)
    loss_of(model, batch(0)).backward()
    expected = list(model.parameters())
    norm = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in expected))
    mine = [parameter for stage in trainer.stages for parameter in stage.submod.parameters()]
    for one, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(one.data, other.data - 0.1 * (0.1 / norm) * other.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("most", [None, 0.1])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_steps_are_those_of_the_unsplit_model(accumulation, most, alone):
    trainer = make_trainer(
        0,
        num_stages=2,
        simulated=True,
        microbatches=4 // accumulation,
        accumulation=accumulation,
        compression=UNCOMPRESSED,
        optimizer={**PLAIN_SGD, "max_grad_norm": most},
    )
    model = unsplit(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        record = trainer.train_step(step)
        loss = loss_of(model, batch(step))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), most or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        assert record.loss == pytest.approx(loss.item(), rel=1e-5)
        assert record.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    trained = [parameter for stage in trainer.stages for parameter in stage.submod.parameters()]
    for mine, expected in zip(trained, model.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def test_each_pass_of_a_batch_is_announced_with_its_samples(alone, monkeypatch):
    trainer = make_trainer(
        0, num_stages=2, simulated=True, microbatches=2, accumulation=2, compression={"warmup": "1 steps"}
    )
    told = []
    for stage in trainer.stages:
        begin = stage.begin
        monkeypatch.setattr(
            stage,
            "begin",
            lambda coming, begin=begin, stage=stage: (told.append((stage.stage_index, coming)), begin(coming)),
        )
    for step in range(2):
        trainer.train_step(step)
    found = [(stage, one.kind, one.accumulation, one.sample_ids.tolist()) for stage, one in told]
    assert found == [
        (stage, kind, index, batch(step)[4 * index : 4 * index + 4].tolist())
        for step, kind in enumerate(["warmup", "train"])
        for index in range(2)
        for stage in range(2)
    ]


def test_warm_up_sends_in_full_and_ends_when_it_should(alone):
    trainer = make_trainer(0, num_stages=2, simulated=True, compression={"warmup": "2 steps"})
    shares = []
    for step in range(4):
        for stage in trainer.stages:
            stage.meter.sent.clear()
        trainer.train_step(step)
        shares.append(
            {traffic.full_rows / traffic.rows for stage in trainer.stages for traffic in stage.meter.sent.values()}
        )
    assert shares == [{1.0}, {1.0}, {0.0}, {0.0}]


@pytest.mark.parametrize(("first", "share"), [("none", 1.0), ("q(8)", 0.0)])
def test_first_visits_through_a_codec_are_not_counted_as_sent_in_full(alone, first, share):
    compression = {"activations": f"aqsgd(q(4), first={first})", "gradients": "none"}
    trainer = make_trainer(0, num_stages=2, simulated=True, compression=compression)
    trainer.train_step(0)
    [traffic] = [sent for route, sent in trainer.stages[0].meter.sent.items() if route[1] == "activations"]
    assert traffic.full_rows == share * traffic.rows and traffic.rows > 0


def test_a_step_reports_what_it_was(alone):
    optimizer = {"lr": 0.1, "warmup_steps": 2, "schedule": "constant", "max_grad_norm": None}
    trainer = make_trainer(0, num_stages=2, simulated=True, compression=UNCOMPRESSED, optimizer=optimizer, steps=3)
    records = []
    trainer.train(records.append)
    assert [(record.step, record.epoch, record.samples) for record in records] == [(step, 0, 8) for step in range(3)]
    assert [record.lr for record in records] == pytest.approx([0.05, 0.1, 0.1])
    frames = 2 * 4  # both channels, four micro-batches
    assert {record.uncompressed for record in records} == {frames * 2 * 3 * 12 * 4}
    assert {record.bytes for record in records} == {frames * (64 + 2 * 3 * 12 * 4)}
    assert all(math.fsum(record.sections.values()) <= record.seconds for record in records)
    assert all(record.sections["compute"] > 0 for record in records)


@pytest.mark.parametrize(
    ("options", "form", "channels"),
    [
        ({}, Sync, set()),
        ({"replicas": 3}, Sync, {"parts", "sums"}),
        ({"replicas": 3, "sync": {"every": 2}}, StepAlone, {"parts"}),
    ],
    ids=["one replica", "sum in each step", "step alone"],
)
def test_what_happens_between_backward_and_step_has_two_forms(alone, options, form, channels):
    trainer = make_trainer(0, simulated=True, num_stages=2, steps=2, microbatches=2, microbatch_size=2, **options)
    trainer.train(lambda record: None)
    assert type(trainer.sync) is form
    sent = {channel for stage in trainer.stages for _, channel, _ in stage.meter.sent}
    assert sent - {"activations", "gradients"} == channels


def test_the_wait_for_the_step_of_other_stages_belongs_to_the_step(alone, monkeypatch):
    """A last stage with few weights stood idle while others stepped, and that was in no step's seconds."""
    trainer = make_trainer(0, num_stages=2, simulated=True, steps=2)
    answers, doing = [False, True], []

    def anyone(where, mine):
        doing.append((trainer.stages[0].meter.doing, mine))
        time.sleep(0.05)
        return answers.pop(0)

    monkeypatch.setattr(collectives, "anyone", anyone)
    trainer.asked = lambda: True
    for step, asked in enumerate((False, True)):
        record = trainer.train_step(step)
        assert trainer.anyone_asked is asked
        assert record.sections["neighbour"] >= 0.05 and record.seconds >= 0.05
    assert doing == 2 * [("waiting for the step of all stages", True)]
