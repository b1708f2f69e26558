import sys
from textwrap import dedent

import pytest
import torch
from torch import nn

from support.own_code import add_module
from support.pipelined import drawn, gradients_of, run, state_of
from thinwire.models.architectures.sequential import factory_blueprint
from thinwire.models.errors import ModelError
from thinwire.models.layers import build_stage, stage_output_examples
from thinwire.models.partition import explicit

IDENTICAL = {"rtol": 0, "atol": 0}
SOURCE = """
    from collections import OrderedDict
    import torch
    from torch import nn

    class Both(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.linear = nn.Linear(width, width)
        def forward(self, x):
            return self.linear(x), x

    class Join(nn.Module):
        def forward(self, x, y):
            return x + y

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
        def forward(self, x):
            return x * self.scale

    class Odd(nn.Sequential):
        def forward(self, x):
            return x

    def mlp(width=4, depth=1):
        blocks = [nn.Linear(width, width), nn.ReLU(inplace=True)] * 1
        for _ in range(depth):
            blocks += [Both(width), Join(), nn.BatchNorm1d(width)]
        return nn.Sequential(*blocks)

    def named():
        return nn.Sequential(OrderedDict(encoder=nn.Linear(4, 3), head=nn.Sequential(nn.Tanh(), nn.Linear(3, 2))))

    def in_bf16():
        return mlp(depth=0).to(torch.bfloat16)

    def plain_list():
        return [nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)]

    def reused():
        relu = nn.ReLU()
        return nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu)

    def attention():
        class Self(nn.Module):
            def __init__(self):
                super().__init__()
                self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            def forward(self, x):
                return self.attention(x, x, x, need_weights=False)[0]
        return [Self(), nn.LayerNorm(4)]

    def tied():
        linear = nn.Linear(4, 4)
        return [linear, nn.ReLU(), linear]

    def scaled():
        return nn.Sequential(nn.Linear(4, 4), nn.Sequential(Scale()))

    def odd():
        return Odd(nn.Linear(4, 4))

    def empty():
        return []

    def one():
        return nn.Linear(4, 4)

    def leaving():
        raise SystemExit(0)

    def failing():
        raise RuntimeError("no")

    not_a_function = 3
"""
INITIALIZE = """
    def initialize(full_name, module):
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, len(full_name))
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current directory with a module of one's own, which Python has not heard of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (tmp_path / "my_models.py").write_text(dedent(SOURCE))
    (tmp_path / "my_filled_models.py").write_text(dedent(SOURCE) + dedent(INITIALIZE))
    (tmp_path / "broken_models.py").write_text("import nothing_of_that_name\n")
    yield
    for name in ("my_models", "my_filled_models", "broken_models"):
        sys.modules.pop(name, None)


def stages_of(blueprint, sizes):
    return [build_stage(blueprint, layers, seed=2) for layers in explicit(sizes, len(blueprint.layers))]


def test_names_and_costs(here):
    blueprint = factory_blueprint("my_models:named", {})
    assert [(spec.name, spec.cost) for spec in blueprint.layers] == [("encoder", 15.0), ("head", 8.0)]
    [stage] = stages_of(blueprint, [2])
    assert list(stage.full_state()) == ["encoder.weight", "encoder.bias", "head.1.weight", "head.1.bias"]


@pytest.mark.parametrize(
    ("factory", "config", "sizes"),
    [("mlp", {"width": 4, "depth": 2}, [3, 2, 3]), ("plain_list", {}, [1, 2]), ("reused", {}, [1, 2, 1])],
)
def test_pipelined_stages_equal_the_unsplit_model(here, factory, config, sizes):
    blueprint = factory_blueprint(f"my_models:{factory}", config)
    stages = stages_of(blueprint, sizes)
    made = getattr(sys.modules["my_models"], factory)(**config)
    whole = Sequence(made)
    whole.load_state_dict({name: tensor.clone() for name, tensor in state_of(stages).items()})
    x = drawn(5, 4, seed=1)
    expected = whole(x)
    gradient = drawn(*expected.shape, seed=2)
    expected.backward(gradient)
    [got] = run(stages, [x], [gradient])
    torch.testing.assert_close(got, expected.detach(), **IDENTICAL)
    torch.testing.assert_close(gradients_of(stages), {n: p.grad for n, p in whole.named_parameters()}, **IDENTICAL)
    torch.testing.assert_close(state_of(stages), dict(whole.state_dict()), **IDENTICAL)


class Sequence(nn.Sequential):
    """As nn.Sequential, except that a tuple is the next one's arguments."""

    def __init__(self, modules):
        super().__init__()
        children = modules._modules.items() if isinstance(modules, nn.Sequential) else enumerate(modules)
        for name, child in children:
            self.add_module(str(name), child)

    def forward(self, x):
        for module in self:
            x = module(*x) if isinstance(x, tuple) else module(x)
        return x


def test_tuples_cross_boundaries(here):
    blueprint = factory_blueprint("my_models:mlp", {})
    first, _ = stage_output_examples(blueprint, [range(0, 3), range(3, 5)], torch.empty(2, 4, device="meta"), "fp32")
    assert [tuple(example.shape) for example in first] == [(2, 4), (2, 4)]


def test_fresh_weights_are_those_of_reset_parameters_whatever_the_cut(here):
    blueprint = factory_blueprint("my_models:mlp", {})
    state = state_of(stages_of(blueprint, [5]))
    torch.testing.assert_close(state, state_of(stages_of(blueprint, [1, 1, 1, 1, 1])), **IDENTICAL)
    # 1 / sqrt(4)
    assert 0 < state["0.weight"].abs().max() <= 0.5
    assert not torch.equal(state["0.weight"], state["2.linear.weight"])
    assert torch.equal(state["4.running_var"], torch.ones(4))


def test_a_factory_in_another_dtype_gets_that_of_the_recipe(here):
    blueprint = factory_blueprint("my_models:in_bf16", {})
    [example] = stage_output_examples(blueprint, [range(2)], torch.empty(2, 4, device="meta"), "fp32")
    [stage] = stages_of(blueprint, [2])
    output = stage(torch.ones(2, 4))
    assert [output.dtype, *(each.dtype for each in example), *(p.dtype for p in stage.parameters())] == [
        torch.float32
    ] * 4


def test_attention_has_a_reset_of_its_own(here):
    state = state_of(stages_of(factory_blueprint("my_models:attention", {}), [2]))
    assert state["0.attention.in_proj_weight"].abs().max() > 0
    assert not state["0.attention.in_proj_bias"].any()


def test_initialize_beside_the_factory_fills_everything(here):
    state = state_of(stages_of(factory_blueprint("my_filled_models:scaled", {}), [1, 1]))
    assert state["0.weight"].unique().tolist() == [len("0")]
    assert state["1.0.scale"].tolist() == [len("1.0")]


@pytest.mark.parametrize(
    ("path", "config", "message"),
    [
        ("my_models", {}, "\"module:name\", got 'my_models'"),
        (":mlp", {}, '"module:name"'),
        (
            "no_such_models:mlp",
            {},
            "model.name: module no_such_models of .* cannot be imported, from .* either",
        ),
        ("broken_models:mlp", {}, "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("my_models:mlpp", {}, r"model.name: module my_models has no 'mlpp' \(did you mean mlp\?\)"),
        ("my_models:not_a_function", {}, "my_models:not_a_function must be a function, got int"),
        ("my_models:mlp", {"with": 4}, r"does not take the config \{'with': 4\}: got an unexpected keyword"),
        ("my_models:leaving", {}, "failed with the config {}: SystemExit: 0"),
        ("my_models:failing", {}, "failed with the config {}: RuntimeError: no"),
        ("my_models:one", {}, "must return an nn.Sequential or a list of modules, got Linear"),
        ("my_models:empty", {}, "at least one module, got none"),
        ("my_models:odd", {}, "the forward of nn.Sequential, got its own"),
        ("my_models:tied", {}, "must not share parameters, got 0, 2; put them into one layer"),
        (
            "my_models:scaled",
            {},
            r"1\.0 of my_models:scaled must have a method reset_parameters .* or define initialize",
        ),
    ],
)
def test_impossible_models(here, path, config, message):
    with pytest.raises(ModelError, match=message) as caught:
        factory_blueprint(path, config)
    assert "\n" not in str(caught.value)


BUFFERS = """
    import os
    import torch
    from torch import nn

    class Random(nn.Module):
        def __init__(self, draw, persistent):
            super().__init__()
            self.register_buffer("W", draw(), persistent=persistent)
        def forward(self, x):
            return x @ self.W

    def drawn(persistent=False):
        return [nn.Linear(4, 4), Random(lambda: torch.randn(4, 4), persistent), nn.Linear(4, 2)]

    def foreign(persistent=False):
        return [nn.Linear(4, 4), Random(lambda: torch.tensor([[float(b) for b in os.urandom(4)]] * 4), persistent)]
"""


@pytest.fixture
def buffers(monkeypatch):
    add_module(monkeypatch, "own_buffers", BUFFERS)


@pytest.mark.parametrize("persistent", [False, True])
def test_buffers_that_are_drawn_are_the_same_in_every_process(buffers, persistent):
    """One that no file holds was another in each process, and `thinwire eval` scored another model than was trained."""
    found = []
    for before in (1, 2):
        torch.manual_seed(before)
        torch.rand(before)
        blueprint = factory_blueprint("own_buffers:drawn", {"persistent": persistent})
        state = torch.random.get_rng_state()
        found.append(build_stage(blueprint, range(1, 2), seed=0)(torch.eye(4)))
        assert torch.equal(torch.random.get_rng_state(), state)
    torch.testing.assert_close(*found, **IDENTICAL)
    assert found[0].unique().numel() == 16


def test_buffers_that_differ_at_each_call_are_refused(buffers):
    with pytest.raises(ModelError, match=r"must have the same values at each call, got others in 1\.W; draw them with"):
        factory_blueprint("own_buffers:foreign", {})
