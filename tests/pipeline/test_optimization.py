import math

import pytest
import torch
from torch.nn import Parameter

from thinwire.pipeline.optimization import clip, lr_factor, make_optimizer, squared_norm
from thinwire.pipeline.options import OptimizerOptions


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "constant"}, [1, 1, 1, 1, 1]),
        ({"schedule": "constant", "warmup_steps": 2}, [0.5, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"schedule": "linear", "warmup_steps": 1}, [1, 1, 0.75, 0.5, 0.25]),
        ({"schedule": "cosine"}, [0.5 * (1 + math.cos(math.pi * k / 5)) for k in range(5)]),
        ({"schedule": "cosine", "cosine_steps": 10}, [0.5 * (1 + math.cos(math.pi * k / 10)) for k in range(5)]),
        ({"schedule": "cosine", "cosine_steps": 2}, [1, 0.5, 0, 0, 0]),
    ],
)
def test_the_course_of_the_learning_rate_is_this_table(options, expected):
    got = [lr_factor(step, 5, OptimizerOptions(**options)) for step in range(5)]
    assert got == pytest.approx(expected, abs=1e-12)


def test_cosine_equals_torchs_annealing_over_twice_its_length():
    """2401.07788 anneals with T_max = 200 over 100 epochs."""
    parameter = Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    options = OptimizerOptions(schedule="cosine", cosine_steps=200, lr=0.01)
    for step in range(100):
        assert options.lr * lr_factor(step, 100, options) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        scheduler.step()


def test_clipping_scales_to_the_norm_over_all_stages_and_never_up():
    stages = [[Parameter(torch.zeros(2)), Parameter(torch.zeros(1))], [Parameter(torch.zeros(1))]]
    values = [[torch.tensor([3.0, 0.0]), torch.tensor([0.0])], [torch.tensor([4.0])]]
    for parameters, gradients in zip(stages, values, strict=True):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
    norm = math.sqrt(sum(squared_norm(parameters) for parameters in stages))
    assert norm == 5.0
    for parameters in stages:
        clip(parameters, norm, 10.0)
    assert stages[1][0].grad == 4.0
    for parameters in stages:
        clip(parameters, norm, 1.0)
    torch.testing.assert_close(stages[0][0].grad, torch.tensor([0.6, 0.0]))
    torch.testing.assert_close(stages[1][0].grad, torch.tensor([0.8]))


def test_parameters_without_gradients_count_for_nothing():
    assert squared_norm([Parameter(torch.ones(3))]) == 0.0


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_the_optimizer_has_the_recipes_numbers(name, kind):
    options = OptimizerOptions(name=name, lr=0.3, weight_decay=0.2, betas=(0.8, 0.9), eps=1e-5, momentum=0.7)
    optimizer = make_optimizer([Parameter(torch.ones(1))], options)
    (group,) = optimizer.param_groups
    assert isinstance(optimizer, kind)
    assert (group["lr"], group["weight_decay"]) == (0.3, 0.2)
    assert group.get("betas", (0.8, 0.9)) == (0.8, 0.9)
    assert group.get("momentum", 0.7) == 0.7


@pytest.mark.parametrize("name", ["sgd", "adamw", "quantized-adam"])
def test_a_stage_without_parameters_has_an_optimizer_too(name):
    optimizer = make_optimizer([], OptimizerOptions(name=name, freeze_after="1 step"))
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.param_groups[0]["params"] == []
