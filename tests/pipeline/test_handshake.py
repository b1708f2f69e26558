"""Stages find each other at start: in the user's own loop, where nobody calls connect, and in any order."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from support.processes import run
from thinwire.pipeline import CompressedStage, CompressionOptions, Wire, WireOptions
from thinwire.pipeline.errors import MismatchError, WireError
from thinwire.pipeline.processes import posts
from thinwire.pipeline.wire.handshake import Handshake

WIDTH, STAGES, STEPS = 6, 4, 2


class Block(nn.Module):
    """What a user might write: a residual block with a norm."""

    def __init__(self, index):
        super().__init__()
        torch.manual_seed(index)
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def loss_of(output, target):
    return nn.functional.mse_loss(output, target, reduction="sum")


def trained_without_connect(rank, schedule_class, codec):
    """The user's own loop; losses of each step where the last stage lives, and the gradients of each stage."""
    wire = Wire(CompressionOptions(activations=codec, gradients=codec), WireOptions(timeout=30))
    example = torch.empty(2, WIDTH)
    mine = [rank, rank + 2]
    blocks = {index: Block(index) for index in mine}
    built = mine[::-1] if rank else mine  # in another order on each process
    stages = {
        index: CompressedStage(blocks[index], index, STAGES, torch.device("cpu"), example, example, wire=wire)
        for index in built
    }
    schedule = schedule_class([stages[index] for index in mine], 4, loss_fn=loss_of, scale_grads=False)
    found = []
    for step in range(STEPS):
        inputs, targets = batch(step)
        losses = []
        schedule.step(*([inputs] if rank == 0 else []), **({"target": targets, "losses": losses} if rank else {}))
        found.append(sum(loss.item() for loss in losses))
    for stage in stages.values():
        stage.close()
    return found, {i: [p.grad.clone() for p in block.parameters()] for i, block in blocks.items()}


@pytest.mark.processes
@pytest.mark.parametrize("schedule_class", [ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble])
def test_two_stages_a_process_train_as_the_unsplit_model_does_though_nobody_connects(schedule_class):
    model = nn.Sequential(*(Block(index) for index in range(STAGES)))
    expected = []
    for step in range(STEPS):
        inputs, targets = batch(step)
        loss = sum(loss_of(model(part), want) for part, want in zip(inputs.chunk(4), targets.chunk(4), strict=True))
        loss.backward()
        expected.append(loss.item())
    (_, first), (losses, second) = run(trained_without_connect, 2, schedule_class, "none")
    assert losses == pytest.approx(expected, rel=1e-5)
    for index, gradients in (first | second).items():
        for gradient, parameter in zip(gradients, model[index].parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5)


def connected_in_opposite_order(rank):
    wire = Wire(options=WireOptions(timeout=30))
    example = torch.empty(2, WIDTH)
    stages = [
        CompressedStage(nn.Linear(WIDTH, WIDTH), index, STAGES, torch.device("cpu"), example, example, wire=wire)
        for index in (rank, rank + 2)
    ]
    for stage in stages if rank else stages[::-1]:  # 2 waits for 3 while 1 waits for 0
        stage.connect()
    return True


@pytest.mark.processes
def test_no_stage_has_to_connect_first():
    assert run(connected_in_opposite_order, 2) == [True, True]


@pytest.mark.parametrize("told", [b"\xff", b"{}", posts.written([]), posts.written(3), posts.written({})[:-1]])
def test_an_announcement_that_is_none_is_one_sentence(alone, told):
    """Whoever reaches torchrun's store can write there: the stage ended in a traceback."""
    group = dist.distributed_c10d._get_default_group()
    handshake = Handshake(group, timedelta(seconds=30))
    handshake._store.set("0/0/1", told)
    with pytest.raises(WireError, match="stage 1 must announce its settings as"):
        handshake.compare("0", "1", 0, 0, {})
    handshake._store.set("0/0/1", posts.written({"\x1b[2J": "\x1b"}))
    with pytest.raises(MismatchError) as caught:
        handshake.compare("0", "1", 0, 0, {})
    assert "\x1b" not in str(caught.value)
