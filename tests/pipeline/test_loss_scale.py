import math

import pytest
import torch
from torch import nn

from thinwire.pipeline.errors import NonFiniteError
from thinwire.pipeline.training.optimization import FIRST_SCALE, SCALE_GROWS_AFTER, LossScale


def test_the_factor_halves_after_a_bad_step_and_doubles_after_many_good_ones():
    scale = LossScale(active=True)
    assert scale.factor == FIRST_SCALE
    assert [scale.allows(norm) for norm in (1.0, math.inf, math.nan, 2.0)] == [True, False, False, True]
    assert (scale.factor, scale.skipped) == (FIRST_SCALE / 4, 2)
    assert all(scale.allows(1.0) for _ in range(SCALE_GROWS_AFTER - 2))
    assert scale.factor == FIRST_SCALE / 4
    scale.allows(1.0)
    assert scale.factor == FIRST_SCALE / 2


def test_a_bad_step_begins_the_count_again_and_the_state_holds_it():
    scale, again = LossScale(active=True), LossScale(active=True)
    for norm in (1.0, 1.0, math.inf, 1.0):
        scale.allows(norm)
    again.load_state_dict(scale.state_dict())
    for _ in range(SCALE_GROWS_AFTER - 1):
        scale.allows(1.0)
        again.allows(1.0)
    assert scale.factor == again.factor == FIRST_SCALE
    assert again.told() == {"factor": FIRST_SCALE, "skipped": 1}


def test_gradients_that_are_never_finite_stop_the_run():
    scale = LossScale(active=True)
    for _ in range(16):
        assert not scale.allows(math.nan)
    assert scale.factor == 1
    with pytest.raises(NonFiniteError, match=r"even with a loss scale of 1; lower optimizer\.lr"):
        scale.allows(math.nan)


def test_losses_and_gradients_come_back_to_the_last_bit():
    scale, parameter = LossScale(active=True), nn.Parameter(torch.zeros(5))
    values = torch.randn(5)
    parameter.grad = values * scale.factor
    scale.undo_gradients([parameter, nn.Parameter(torch.zeros(2))])
    assert torch.equal(parameter.grad, values)
    [loss] = scale.undo([values[0] * scale.factor])
    assert torch.equal(loss, values[0])


def test_without_fp16_nothing_changes():
    scale, parameter = LossScale(active=False), nn.Parameter(torch.zeros(5))
    parameter.grad = torch.full((5,), 3.0)
    scale.undo_gradients([parameter])
    assert (scale.factor, scale.told(), parameter.grad.tolist()) == (1.0, None, [3.0] * 5)
