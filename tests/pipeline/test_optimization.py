import math
import platform
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from support.allocated import peak_bytes
from thinwire.models.layers import Chain, Stage
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.options import OptimizerOptions
from thinwire.pipeline.training.optimization import _set_lr, clip, ends_of, lr_factor, make_optimizer, squared_norm

FREEZING = {"quantized-adam": {"freeze_after": "1 step"}}


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


@pytest.mark.slow
def test_the_norm_of_a_large_gradient_is_taken_in_parts():
    """torch copies what it adds up in float64: four times a gradient of bf16, and that of a head is the largest."""
    large = Parameter(torch.empty(40, 2**18, dtype=torch.bfloat16))
    large.grad = torch.randn(large.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = []
    assert peak_bytes(lambda: found.append(squared_norm([large]))) < 2 * large.nbytes
    assert found == [pytest.approx(float(large.grad.double().square().sum()), rel=1e-12)]


LEFT_IN_THE_HEAP = """
import ctypes, re
from pathlib import Path
import torch
from torch.nn import Parameter
from thinwire.pipeline.training.optimization import squared_norm

ctypes.CDLL(None).mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, as glibc sets it when tensors of 32 MB are freed
large = Parameter(torch.empty(80, 2**19, dtype=torch.bfloat16))
large.grad = torch.ones_like(large)
held = lambda: int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
before = held()
squared_norm([large])
print(held() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="reads /proc, and the heap of glibc")
def test_the_norm_of_a_large_gradient_leaves_no_gaps_in_the_heap():
    """The norms of parts lay between their copies in float64: a head of 156 M parameters left 1.2 GB in pieces."""
    ran = subprocess.run([sys.executable, "-c", LEFT_IN_THE_HEAP], check=True, stdout=subprocess.PIPE, text=True)
    assert int(ran.stdout) < 100e6, "335 MB when each norm was a tensor"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_step_takes_no_memory_beside_what_the_optimizer_keeps(name, dtype):
    parameters = [Parameter(torch.ones(1000, 1000, dtype=dtype)) for _ in range(2)]
    optimizer = make_optimizer(parameters, OptimizerOptions(name=name, weight_decay=0.1))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert peak_bytes(optimizer.step) < 1000


def test_a_parameter_of_complex_numbers_has_an_optimizer():
    parameter = Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = make_optimizer([parameter], OptimizerOptions(name="adamw", lr=0.5, weight_decay=0.0))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((2,), 0.5, dtype=torch.complex64))


def test_a_gradient_may_be_sparse_or_complex():
    """Each curve has the norm, so no gradient may be without one."""
    table, waves = torch.nn.Embedding(5, 2, sparse=True), Parameter(torch.ones(2, dtype=torch.complex64))
    table(torch.tensor([3, 3, 1])).sum().backward()
    waves.grad = torch.tensor([3 + 4j, 0])
    assert squared_norm([table.weight, waves]) == 2 * 2**2 + 2 + 5**2


def test_parameters_without_gradients_count_for_nothing():
    assert squared_norm([Parameter(torch.ones(3))]) == 0.0


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_the_optimizer_has_the_recipes_numbers(name, kind):
    own = {"momentum": 0.7} if name == "sgd" else {"betas": (0.8, 0.9), "eps": 1e-5}
    options = OptimizerOptions(name=name, lr=0.3, weight_decay=0.2, **own)
    optimizer = make_optimizer([Parameter(torch.ones(1))], options)
    (group,) = optimizer.param_groups
    assert isinstance(optimizer, kind)
    assert (group["lr"], group["weight_decay"]) == (0.3, 0.2)
    assert group.get("betas", (0.8, 0.9)) == (0.8, 0.9)
    assert group.get("momentum", 0.7) == 0.7


@pytest.mark.parametrize("name", ["sgd", "adamw", "quantized-adam"])
def test_a_stage_without_parameters_has_an_optimizer_too(name):
    optimizer = make_optimizer([], OptimizerOptions(name=name, **FREEZING.get(name, {})))
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.param_groups[0]["params"] == []


def test_other_courses_are_those_of_transformers():
    """Without a warm-up, whose first step is not at zero here."""
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([Parameter(torch.zeros(1))], lr=0.5)
    cases = [
        ({"min_lr": 0.05}, "cosine_with_min_lr", {"min_lr": 0.05}),
        (
            {"schedule": "wsd", "min_lr": 0.1},
            "warmup_stable_decay",
            {"num_decay_steps": 2, "decay_type": "linear", "min_lr_ratio": 0.2},
        ),
    ]
    for fields, name, arguments in cases:
        scheduler = get_scheduler(name, optimizer, 0, 20, scheduler_specific_kwargs=arguments)
        options = OptimizerOptions(lr=0.5, **fields)
        expected = [scheduler.lr_lambdas[0](step) for step in range(20)]
        assert [lr_factor(step, 20, options) for step in range(20)] == pytest.approx(expected, abs=1e-12), name


def test_a_warmup_as_long_as_training_is_told():
    """A run of 4 steps with a warm-up of 100 ended at 4 % of the rate without a word."""
    told = OptimizerOptions(warmup_steps=100).note_on_warmup(4)
    assert told == (
        "the learning rate rises to the end, to 4% of optimizer.lr: optimizer.warmup_steps of 100 is as long as all 4 "
        "steps; lower it, or take optimizer.warmup_ratio"
    )
    fitting = (OptimizerOptions(warmup_steps=3), OptimizerOptions(warmup_ratio=0.9), OptimizerOptions())
    assert [options.note_on_warmup(4) for options in fitting] == [None] * 3
    assert OptimizerOptions(warmup_steps=100).note_on_warmup(0) is None


def test_a_warmup_is_a_share_of_training():
    options = OptimizerOptions(schedule="linear", warmup_ratio=0.25, lr=1.0, min_lr=0.5)
    assert [lr_factor(step, 6, options) for step in range(6)] == [0.5, 1, 1, 0.875, 0.75, 0.625]


def weights():
    """A matrix, a norm, an embedding and a convolution, with gradients."""
    found = [Parameter(torch.ones(shape)) for shape in ((4, 4), (4,), (8, 4), (2, 2, 1))]
    for index, parameter in enumerate(found):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
    return found


@pytest.mark.parametrize("name", ["adamw", "sgd", "quantized-adam", "muon", "NAdam"])
def test_norms_and_biases_may_stay_out_of_the_decay(name):
    options = OptimizerOptions(name=name, weight_decay=0.5, no_decay=True, lr=0.1, **FREEZING.get(name, {}))
    parameters = weights()
    for parameter in parameters:
        parameter.grad.zero_()
    make_optimizer(parameters, options).step()
    matrix, norm, *_ = parameters
    assert torch.equal(norm, torch.ones(4))
    assert (matrix < 1).all()
    groups = make_optimizer(parameters, replace(options, no_decay=False)).param_groups
    assert all(group["weight_decay"] == 0.5 for group in groups)


def test_another_optimizer_has_its_own_numbers():
    options = OptimizerOptions(name="RMSprop", lr=0.3, weight_decay=0.2, eps=1e-5, arguments={"alpha": 0.5})
    (group,) = make_optimizer(weights(), options).param_groups
    assert (group["lr"], group["weight_decay"], group["eps"], group["alpha"]) == (0.3, 0.2, 1e-5, 0.5)
    assert group["momentum"] == 0, "the default of the class, not that of sgd"
    (given,) = make_optimizer(weights(), replace(options, momentum=0.9)).param_groups
    assert given["momentum"] == 0.9, "the recipe gives it, though it is what sgd has anyway"
    own = OptimizerOptions(name="torch.optim:Adafactor", lr=0.3)
    assert isinstance(make_optimizer(weights(), own), torch.optim.Adafactor)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": "adamx"}, "optimizer.name must be adamw, sgd, muon, quantized-adam, a class of torch.optim or"),
        ({"name": "LBFGS"}, "must be one that steps once a batch, got LBFGS"),
        ({"name": "SparseAdam"}, "must be one for dense gradients, which weights have here, got SparseAdam"),
        ({"name": "Adafactor", "betas": (0.5, 0.9)}, "optimizer.betas is no argument of Adafactor; leave it out"),
        ({"name": "RMSprop", "arguments": {"beta": 1}}, "optimizer.beta is no argument of RMSprop"),
        ({"arguments": {"amsgrad": True}}, "optimizer.arguments must be left out for adamw"),
        ({"min_lr": 2.0}, "optimizer.min_lr must be at most optimizer.lr of 0.001, got 2.0"),
        ({"warmup_ratio": 0.1, "warmup_steps": 3}, "optimizer.warmup_ratio must be 0 beside warmup_steps"),
        ({"eps": -1e-8}, "optimizer.eps must be finite and not negative, got -1e-08"),
        ({"name": "sgd", "momentum": -0.9}, "optimizer.momentum must be finite and not negative, got -0.9"),
        ({"max_grad_norm": 0.0}, "optimizer.max_grad_norm must be above 0, because nothing moves by gradients of"),
        ({"cosine_steps": 0}, "optimizer.cosine_steps must be at least 1 or null, got 0"),
        ({"momentum": 0.5}, "momentum must be null for optimizer.name adamw, got 0.5; sgd and muon use it"),
        ({"name": "sgd", "betas": (0.5, 0.9)}, "betas must be null for optimizer.name sgd, got (0.5, 0.9); adamw"),
        ({"freeze_after": "2 steps"}, "must be 0 steps for optimizer.name adamw, got 2 steps; quantized-adam uses it"),
        ({"name": "NAdam", "freeze_after": "2 steps"}, "must be 0 steps for optimizer.name NAdam, got 2 steps"),
        ({"schedule": "constant", "min_lr": 1e-4}, "min_lr must be 0.0 for optimizer.schedule constant"),
        ({"schedule": "linear", "cosine_steps": 9}, "cosine_steps must be null for optimizer.schedule linear"),
        ({"name": "muon", "arguments": {"nesterof": False}}, "optimizer.nesterof is no argument of muon; leave it out"),
        ({"name": "muon", "arguments": {"lr": 0.1}}, "optimizer.arguments must not have lr, which would not follow"),
        ({"name": "NAdam", "arguments": {"weight_decay": 0.1}}, "must not have weight_decay, which would not follow"),
    ],
)
def test_what_an_optimizer_cannot_be(fields, said):
    with pytest.raises(OptionsError) as caught:
        OptimizerOptions(**fields)
    assert said in str(caught.value)


def test_an_argument_that_a_class_refuses_is_one_sentence():
    for name, argument in (("muon", {"momentum": -1.0}), ("RMSprop", {"alpha": -1.0})):
        with pytest.raises(OptionsError, match=f"^optimizer {name} cannot be made: "):
            make_optimizer(weights(), OptimizerOptions(name=name, arguments=argument))


def test_muon_moves_matrices_and_adamw_all_else():
    parameters = weights()
    matrix, norm, embedding, convolution = parameters
    options = OptimizerOptions(name="muon", lr=0.1, weight_decay=0.1)
    optimizer = make_optimizer(parameters, options, ends={id(embedding)})
    expected = [[matrix], [norm, embedding, convolution]]
    copies = [[Parameter(each.detach().clone()) for each in group] for group in expected]
    for group, copied in zip(expected, copies, strict=True):
        for each, copy in zip(group, copied, strict=True):
            copy.grad = each.grad.clone()
    alone = [
        torch.optim.Muon(copies[0], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(copies[1], lr=0.1, weight_decay=0.1, fused=True),
    ]
    for each in (optimizer, *alone):
        each.step()
        each.step()
    for group, copied in zip(expected, copies, strict=True):
        assert all(torch.equal(each, copy) for each, copy in zip(group, copied, strict=True))
    assert set(optimizer.state[matrix]) == {"momentum_buffer"}
    assert "exp_avg" in optimizer.state[embedding]


def test_muon_has_the_momentum_of_the_recipe_or_that_of_torch():
    """`optimizer.momentum` did nothing there."""
    for given, expected in (({}, 0.95), ({"momentum": 0.5}, 0.5), ({"arguments": {"momentum": 0.6}}, 0.6)):
        matrices, *_ = make_optimizer(weights(), OptimizerOptions(name="muon", **given)).param_groups
        assert matrices["momentum"] == expected


def test_the_last_layer_that_has_weights_is_no_matrix_inside():
    parts = {"inside": nn.Linear(3, 3), "output": (output := nn.Linear(3, 2)), "chances": nn.LogSoftmax(-1)}
    stage = SimpleNamespace(submod=Stage([Chain({name: part}) for name, part in parts.items()]), is_last=True)
    assert ends_of(stage) == {id(each) for each in output.parameters()}
    stage.is_last = False
    assert not ends_of(stage)


def test_a_learning_rate_that_is_a_tensor_is_set_in_place():
    group = {"lr": torch.tensor(1.0)}
    kept = group["lr"]
    _set_lr(group, 0.5)
    assert group["lr"] is kept
    assert kept == 0.5
