import math

import pytest
import torch
from torch.nn import functional

from thinwire.models.tasks import IGNORE, LanguageModeling, mask_padding

TASK = LanguageModeling()


@pytest.fixture
def output() -> torch.Tensor:
    return torch.randn(6, 5, 11, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.fixture
def target() -> torch.Tensor:
    """Unequal masks: rows 0 and 1 keep everything, 2 and 3 lose most, 4 and 5 everything."""
    target = torch.randint(11, (6, 5), generator=torch.Generator().manual_seed(1))
    target[2:4, 1:] = IGNORE
    target[4:] = IGNORE
    return target


def test_loss_sum_adds_up_the_valid_targets(output, target):
    log_probabilities = output.log_softmax(-1)
    expected = -sum(log_probabilities[b, t, target[b, t]] for b in range(4) for t in range(5 if b < 2 else 1))
    torch.testing.assert_close(TASK.loss_sum(output, target), expected)
    assert TASK.num_valid(target) == 12


def test_sums_of_micro_batches_make_the_mean_of_the_batch(output, target):
    whole = functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORE)
    [expected] = torch.autograd.grad(whole, output, retain_graph=True)

    pairs = list(zip(output.split(2), target.split(2), strict=True))
    loss = sum(TASK.loss_sum(o, t) for o, t in pairs) / sum(TASK.num_valid(t) for _, t in pairs)
    [got] = torch.autograd.grad(loss, output)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(got, expected)

    mean_of_means = sum(TASK.loss_sum(o, t) / TASK.num_valid(t) for o, t in pairs[:2]) / 2
    assert abs(mean_of_means - whole) > 0.01, "these masks cannot tell the two apart"


def test_a_fully_masked_micro_batch_is_worth_nothing(output, target):
    loss = TASK.loss_sum(output[4:], target[4:])
    [gradient] = torch.autograd.grad(loss, output)
    assert loss.item() == 0
    torch.testing.assert_close(gradient, torch.zeros_like(output), rtol=0, atol=0)
    assert TASK.num_valid(target[4:]) == 0


def test_the_sum_is_taken_in_float32():
    output = torch.zeros(8, 128, 256, dtype=torch.bfloat16)
    loss = TASK.loss_sum(output, torch.zeros(8, 128, dtype=torch.int64))
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    torch.testing.assert_close(loss.item(), 1024 * math.log(256), rtol=1e-5, atol=0)


def test_perplexity():
    assert TASK.perplexity(0.0) == 1.0
    assert TASK.perplexity(math.log(21.0)) == pytest.approx(21.0)
    assert TASK.perplexity(1e6) == math.inf
    assert math.isnan(TASK.perplexity(math.nan))


@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 2, 4)])
def test_mask_padding(shape):
    target = torch.ones(shape, dtype=torch.int64)
    masked = mask_padding(target, torch.tensor([True, False, True]))
    assert masked.shape == shape
    assert masked.dtype == torch.int64
    assert (masked[1] == IGNORE).all()
    assert (masked[[0, 2]] == 1).all()
    assert (target == 1).all()
