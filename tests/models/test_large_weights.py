"""Large weights: their gradients are those of torch, and those of later micro-batches need no second one."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire.models import large_weights
from thinwire.models.large_weights import LargeEmbedding, LargeLinear, add_in_place

KINDS = {"linear": LargeLinear, "embedding": LargeEmbedding}


def plain(kind):
    torch.manual_seed(0)
    return nn.Linear(3, 5, bias=False) if kind == "linear" else nn.Embedding(5, 3)


def batch(kind, seed):
    generator = torch.Generator().manual_seed(seed)
    if kind == "embedding":
        return torch.randint(5, (2, 4), generator=generator)
    return torch.randn(2, 4, 3, generator=generator).requires_grad_()


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def large(monkeypatch, kind):
    monkeypatch.setattr(large_weights, "LARGE", 15)
    module = plain(kind)
    add_in_place(nn.Sequential(module))
    assert type(module) is KINDS[kind]
    return module


class Computed(TorchDispatchMode):
    """The operations whose result has the shape of the weight."""

    def __init__(self, shape):
        super().__init__()
        self.names, self._shape = [], shape

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape == self._shape:
            self.names.append(func.overloadpacket.__name__)
        return result


def test_gradients_of_several_microbatches_are_those_of_torch(kind, large):
    other = plain(kind)
    for seed in range(3):
        given, same = batch(kind, seed), batch(kind, seed)
        large(given).square().sum().backward()
        other(same).square().sum().backward()
        torch.testing.assert_close(given.grad, same.grad)
    torch.testing.assert_close(large.weight.grad, other.weight.grad)


def test_a_later_microbatch_computes_no_second_gradient(kind, large):
    large(batch(kind, 0)).sum().backward()
    first = large.weight.grad
    with Computed(large.weight.shape) as computed:
        large(batch(kind, 1)).sum().backward()
    assert large.weight.grad is first
    assert set(computed.names) - {"detach"} == {{"linear": "addmm_", "embedding": "index_add_"}[kind]}


@pytest.mark.slow
def test_rows_are_added_up_in_one_order_by_several_threads(monkeypatch):
    monkeypatch.setattr(large_weights, "LARGE", 1)
    ids, found = torch.arange(1000) % 3, set()
    torch.set_num_threads(2)
    try:
        for _ in range(10):
            torch.manual_seed(0)
            module = nn.Embedding(1000, 100)
            add_in_place(module)
            factor = torch.randn(1000, 100)
            for _ in range(2):
                (module(ids) * factor).sum().backward()
            found.add(module.weight.grad.numpy().tobytes())
    finally:
        torch.set_num_threads(1)
    assert len(found) == 1


def test_a_gradient_that_is_asked_for_is_returned_and_not_added(kind, large):
    large(batch(kind, 0)).sum().backward()
    before = large.weight.grad.clone()
    [got] = torch.autograd.grad(large(batch(kind, 1)).sum(), [large.weight])
    same = plain(kind)
    [wanted] = torch.autograd.grad(same(batch(kind, 1)).sum(), [same.weight])
    torch.testing.assert_close(got, wanted)
    if kind == "linear":
        torch.autograd.grad(large(given := batch(kind, 1)).sum(), [given])
    assert torch.equal(large.weight.grad, before)


def test_a_watched_gradient_is_whole(kind, large):
    seen = []
    large(batch(kind, 0)).sum().backward()
    large.weight.register_hook(seen.append)
    large(batch(kind, 1)).sum().backward()
    same = plain(kind)
    same(batch(kind, 1)).sum().backward()
    torch.testing.assert_close(seen, [same.weight.grad])


@pytest.mark.parametrize("kind", ["linear"], indirect=True)
def test_products_narrower_than_the_weight_are_those_of_torch(kind, large):
    with torch.autocast("cpu", torch.bfloat16):
        output = large(batch(kind, 0))
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert large.weight.grad.dtype == torch.float32


def test_small_weights_and_what_has_a_bias_stay(monkeypatch):
    monkeypatch.setattr(large_weights, "LARGE", 15)
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(3, 4, bias=False), nn.Embedding(4, 3), nn.Embedding(5, 3, 0))
    add_in_place(module)
    assert [type(each) for each in module] == [nn.Linear, nn.Linear, nn.Embedding, nn.Embedding]
