import torch
from torch import nn

from support.pipelined import reset
from thinwire.models import large_weights
from thinwire.models.costs import measure
from thinwire.models.layers import Blueprint, Chain, LayerSpec


class Pair(nn.Module):
    def forward(self, x):
        return x + 1, x.argmax(dim=1)


class Back(nn.Module):
    def forward(self, x, ids):
        return x * ids[:, None]


def blueprint_of(**modules):
    layers = tuple(LayerSpec(name, lambda name=name, m=m: Chain({name: m()}), cost=7.0) for name, m in modules.items())
    return Blueprint(layers, reset)


BLUEPRINT = blueprint_of(
    first=lambda: nn.Linear(6, 4), tanh=nn.Tanh, relu=nn.ReLU, last=lambda: nn.Linear(4, 3, bias=False)
)


def of_three():
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def test_memory_is_exact():
    first, tanh, relu, last = measure(BLUEPRINT, torch.randn(5, 6))
    # a linear layer holds its input; the others theirs too, and their outputs are the next one's
    assert (first.parameter_bytes, first.activation_bytes, first.output_bytes) == (4 * (24 + 4), 4 * 30, 4 * 20)
    for middle in (tanh, relu):
        assert (middle.parameter_bytes, middle.activation_bytes, middle.output_bytes) == (0, 4 * 20, 4 * 20)
    assert (last.parameter_bytes, last.activation_bytes, last.output_bytes) == (4 * 12, 4 * 20, 4 * 15)
    assert first.memory(parameter_copies=4, microbatches=3) == 4 * 112 + 3 * 120
    # its weight has a gradient before that is added; outputs, and their gradient
    assert first.working_bytes == 4 * 24 + 2 * 4 * 20
    [again] = measure(blueprint_of(both=of_three), torch.randn(5, 6), recompute="block")
    assert (again.activation_bytes, again.working_bytes) == (4 * 30, 4 * 20 + 4 * 24 + 2 * 4 * 15)


def test_a_large_weight_needs_no_second_gradient_where_products_have_its_type(monkeypatch):
    monkeypatch.setattr(large_weights, "LARGE", 12)
    for precision, more in (("fp32", 0), ("bf16", 4 * 12)):
        *_, last = measure(BLUEPRINT, torch.randn(5, 6), precision=precision)
        assert last.working_bytes == more + 2 * last.output_bytes


def test_what_a_layer_holds_inside_counts():
    [both] = measure(blueprint_of(both=of_three), torch.randn(5, 6))
    assert both.activation_bytes == 4 * (30 + 20)


def test_times_are_positive_and_nothing_else_is_disturbed():
    before = torch.get_rng_state()
    costs = measure(BLUEPRINT, torch.ones(5, 6))
    assert [cost.name for cost in costs] == ["first", "tanh", "relu", "last"]
    assert all(cost.forward > 0 and cost.backward > 0 for cost in costs)
    assert all(cost.compute == cost.forward + cost.backward for cost in costs)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_layer_is_gone_before_the_next_is_built():
    alive = set()

    class Watched(nn.Linear):
        def __init__(self):
            assert not alive, "two layers at once"
            super().__init__(4, 4)
            alive.add(id(self))

        def __del__(self):
            alive.discard(id(self))

    measure(blueprint_of(a=Watched, b=Watched, c=Watched), torch.randn(2, 4))


def test_tuples_integers_and_layers_without_gradients():
    blueprint = blueprint_of(embed=lambda: nn.Embedding(3, 4), pair=Pair, back=Back)
    embed, pair, back = measure(blueprint, torch.zeros(5, dtype=torch.int64))
    assert embed.output_bytes == 4 * 20
    assert pair.output_bytes == 4 * 20 + 8 * 5
    assert back.activation_bytes == 4 * 20 + 8 * 5
    [alone, _] = measure(blueprint_of(pair=Pair, back=Back), torch.randn(5, 4))
    assert alone.backward == 0
    assert alone.forward > 0
