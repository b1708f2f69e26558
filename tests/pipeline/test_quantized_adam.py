"""QuantizedAdam: the arithmetic of 2206.01299's code, equal replicas, and what it does beside other options."""

import math

import pytest
import torch
from torch.nn import Parameter

from support.exchanging import SIZE, STEPS_PER_EPOCH, exchange, gradients, make
from support.toy import Sampler, Samples, Task, make_trainer, module
from thinwire.compress import Progress
from thinwire.errors import ThinwireWarning
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.options import OptimizerOptions
from thinwire.pipeline.training.optimization import make_optimizer

FREEZE_AFTER = 4
OPTIONS = OptimizerOptions(
    name="quantized-adam", lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, freeze_after=f"{FREEZE_AFTER} steps"
)
UNSEEN = 1234
"""An element whose gradient is zero throughout the warm-up."""


def given(step, count):
    """The gradients of each replica in a step, flat."""
    flat = gradients(step, count)
    if step < FREEZE_AFTER:
        flat[:, UNSEEN] = 0
    return flat


def trained(count, steps, expression="ef(q(4))"):
    """Yield, after each step, the weights of each replica, flat."""
    replicas = make(expression, count, OPTIONS.sends_in_full)
    optimizers = [make_optimizer(each.parameters.values(), OPTIONS, lambda _: count) for each in replicas]
    for step in range(steps):
        for replica, optimizer, flat in zip(replicas, optimizers, given(step, count), strict=True):
            replica.set_gradients(flat)
            optimizer.frozen = OPTIONS.is_frozen(Progress(step, STEPS_PER_EPOCH))
            optimizer.to_momentum()
        exchange(replicas, step)
        for optimizer in optimizers:
            optimizer.step()
        yield [replica.weights for replica in replicas]


def quantized(flat):
    """Rows of 512: s = max|x| as bf16, rounded up; 16 intervals of [-s, s], and the middle of each.

    A value on the border of two intervals belongs to the one nearer to zero.
    """
    rows = torch.nn.functional.pad(flat, (0, -flat.numel() % 512)).view(-1, 512)
    largest = rows.abs().amax(1, keepdim=True)
    scale = largest.bfloat16().float()
    bits = torch.where(scale < largest, scale.view(torch.int32) + 0x10000, scale.view(torch.int32))
    scale = bits.view(torch.float32)
    steps = rows / scale * 8
    code = torch.where(steps > 0, steps.ceil() - 1, steps.floor())
    return torch.where(scale > 0, (code + 0.5) / 8 * scale, 0.0).flatten()[: flat.numel()]


def quantized_with_zero(flat):
    """Rows of 512: s = the element of largest magnitude as bf16, rounded up; points k s / 8, k from -7 to 8."""
    rows = torch.nn.functional.pad(flat, (0, -flat.numel() % 512)).view(-1, 512)
    largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    scale = largest.bfloat16().float()
    short = scale.abs() < largest.abs()
    scale = torch.where(short, scale.view(torch.int32) + 0x10000, scale.view(torch.int32)).view(torch.float32)
    return ((rows / scale * 8).round().clamp(-7, 8) / 8 * scale).nan_to_num().flatten()[: flat.numel()]


def published(count, steps, quantized, kept):
    """Yield the weights as 2206.01299's code computes them, from the gradients of workers whose mean counts.

    The mean of the workers is taken before they quantize: for two of them halving is exact. Our own rule is that an
    element without a second moment stays as it is.

    Args:
        count: workers.
        steps: how many.
        quantized: what arrives of a row of all elements.
        kept: the dtype of the errors between two steps.
    """
    (first, second), lr, eps, decay = OPTIONS.betas, OPTIONS.lr, OPTIONS.eps, OPTIONS.weight_decay
    x, m, v = torch.zeros(3, SIZE)
    worker, server = torch.zeros(count, SIZE), torch.zeros(SIZE)
    for t in range(1, steps + 1):
        g = given(t - 1, count) * count
        if t <= FREEZE_AFTER:
            mean = sum(g) / count
            m = first * m + (1 - first) * mean
            v = second * v + (1 - second) * mean**2
        else:
            sent = (first * m + (1 - first) * g) / count + worker
            arrived = torch.stack([quantized(each) for each in sent])
            worker = (sent - arrived).to(kept).float()
            total = sum(arrived) + server
            m = quantized(total)
            server = (total - m).to(kept).float()
        step_size = lr * math.sqrt(1 - second**t) / (1 - first**t)
        moved = torch.where(v > 0, m / (v.sqrt() + eps), 0.0)
        x = x - step_size * moved
        x = x - lr * decay * x
        yield x


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(
    ("expression", "quantized", "kept"),
    [
        ('ef(q(4, grid="midrise"))', quantized, torch.float32),
        ('ef(q(4, grid="midtread"), store_bits=16)', quantized_with_zero, torch.bfloat16),
    ],
    ids=["of the text", "of the code"],
)
def test_it_is_the_published_arithmetic(count, expression, quantized, kept):
    """Three replicas have parts of two or three rows, four have one or two, and the last row is ragged."""
    ours, theirs = trained(count, 12, expression), published(count, 12, quantized, kept)
    for step, (replicas, wanted) in enumerate(zip(ours, theirs, strict=True)):
        for weights in replicas:
            torch.testing.assert_close(weights, wanted, rtol=1e-4, atol=1e-6, msg=lambda said, at=step: f"{at}: {said}")
        assert weights[UNSEEN] == 0
        assert weights.count_nonzero() == SIZE - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "expression"), [(2, 'ef(q(4, grid="midtread"), store_bits=16)'), (3, "ef(topk(0.1))")]
)
def test_replicas_stay_equal(count, expression):
    for mine, *others in trained(count, 25, expression):
        assert all(torch.equal(mine, other) for other in others)
    assert mine.isfinite().all()


def test_gradients_travel_whole_until_the_momentum_travels_in_few_bits():
    replicas = make("ef(q(4))", 2, OPTIONS.sends_in_full)
    sizes = []
    for step in (FREEZE_AFTER - 1, FREEZE_AFTER):
        before = sum(replica.meter.exchanged for replica in replicas)
        for replica, flat in zip(replicas, given(step, 2), strict=True):
            replica.set_gradients(flat)
        exchange(replicas, step)
        sizes.append(sum(replica.meter.exchanged for replica in replicas) - before)
    # both replicas own rows: two frames of parts and two of sums, each counted where it leaves and where it arrives
    assert sizes == [2 * (4 * 64 + 2 * 7 * size) for size in (4 * 512, 256 + 2)]


def test_the_warm_up_is_plain_adam():
    """With eps at zero, where the two differ."""
    options = OptimizerOptions(name="quantized-adam", lr=0.1, eps=0.0, freeze_after="1 epoch")
    mine, other = (Parameter(torch.ones(50)) for _ in range(2))
    optimizers = [make_optimizer([mine], options), torch.optim.Adam([other], lr=0.1, eps=0.0)]
    for step in range(5):
        mine.grad = torch.randn(50, generator=torch.Generator().manual_seed(step))
        other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(mine, other)


def test_a_parameter_without_a_gradient_keeps_its_part_of_the_momentum():
    used, unused = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    optimizer = make_optimizer([used, unused], OPTIONS, lambda _: 2)
    used.grad = torch.full((3,), 5.0)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.frozen = True
    optimizer.to_momentum()
    torch.testing.assert_close(used.grad, torch.full((3,), 0.8 * (1 - 0.8) * 5 / 2))
    assert unused.grad is None
    assert torch.equal(unused, torch.ones(3))


def test_weights_whose_first_gradient_comes_too_late_are_told_of_once(recwarn):
    late, later = Parameter(torch.ones(3)), Parameter(torch.ones(4))
    optimizer = make_optimizer([late, later], OPTIONS)
    optimizer.frozen = True
    for _ in range(2):
        late.grad, later.grad = torch.ones(3), torch.ones(4)
        optimizer.step()
    torch.testing.assert_close(late.detach(), torch.full((3,), (1 - 0.01 * 0.1) ** 2))  # its decay alone
    [said] = [str(warning.message) for warning in recwarn if warning.category is ThinwireWarning]
    assert said == (
        "quantized-adam: weights of shape [3] have their first gradient after the second moment is frozen, so they "
        "stay as they are; make optimizer.freeze_after longer"
    )


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_are_one_pipeline_with_so_many_times_the_batch(replicas, alone):
    """Clipped by the norm of the gradients, then of the momentum; the learning rate rises and falls."""
    optimizer = {
        "name": "quantized-adam",
        "freeze_after": "3 steps",
        "lr": 0.05,
        "max_grad_norm": 0.05,
        "schedule": "linear",
        "warmup_steps": 2,
        "weight_decay": 0.1,
    }
    options = {"simulated": True, "microbatches": 2, "microbatch_size": 1, "steps": 8, "optimizer": optimizer}
    options |= {"compression": {"activations": "none", "gradients": "none"}}
    several = make_trainer(0, **options | {"replicas": replicas, "accumulation": 2})
    one = make_trainer(0, **options | {"accumulation": 2 * replicas})
    records = {several: [], one: []}
    for trainer, kept in records.items():
        trainer.train(kept.append)
    for ours, theirs in zip(records[several], records[one], strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    assert records[one][0].grad_norm > 0.05  # it was clipped


def twice(optimizer, steps, size):
    """One layer used twice, in one model without a pipeline: its weights at the end, and the loss of each step."""
    layer, samples, task, losses = module(0), Samples(), Task(), []
    options = OptimizerOptions(**optimizer)
    adam = make_optimizer(layer.parameters(), options)
    for step in range(steps):
        ids = Sampler(size).batch(step).ids
        targets = samples.targets(ids)
        loss = task.loss_sum(layer(layer(samples.inputs(ids, 0))), targets) / task.num_valid(targets)
        loss.backward()
        adam.frozen = options.is_frozen(Progress(step, STEPS_PER_EPOCH))
        adam.to_momentum()
        adam.step()
        adam.zero_grad()
        losses.append(float(loss.detach()))
    return list(layer.parameters()), losses


@pytest.mark.parametrize("replicas", [1, 2])
def test_weights_that_two_stages_share_have_one_momentum(replicas, alone):
    """Each copy sends its part of the momentum, and the copies add theirs up."""
    optimizer = {"name": "quantized-adam", "freeze_after": "3 steps", "lr": 0.05, "schedule": "constant"}
    wanted, losses = twice(optimizer, 8, 2 * replicas)
    options = {"simulated": True, "microbatches": 2, "microbatch_size": 1, "steps": 8, "shared": True}
    compression = {"activations": "none", "gradients": "none"}
    trainer = make_trainer(0, **options, replicas=replicas, optimizer=optimizer, compression=compression)
    records = []
    trainer.train(records.append)
    assert [record.loss for record in records] == pytest.approx(losses, rel=1e-4)
    for stage in trainer.stages:
        for ours, theirs in zip(stage.submod.parameters(), wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("freeze_after", "said"),
    [
        ("0 steps", "optimizer.freeze_after must be at least 1 step for quantized-adam"),
        ("soon", 'optimizer.freeze_after must be like "20 epochs" or "500 steps", got \'soon\''),
    ],
)
def test_it_must_say_when_it_freezes(freeze_after, said):
    with pytest.raises(OptionsError, match=said):
        OptimizerOptions(name="quantized-adam", freeze_after=freeze_after)


def test_an_epoch_is_a_duration_too():
    options = OptimizerOptions(name="quantized-adam", freeze_after="2 epochs")
    assert [options.is_frozen(Progress(step, 10)) for step in (0, 19, 20, 30)] == [False, False, True, True]
    assert not OptimizerOptions(name="adamw").sends_in_full(Progress(0, 10))
