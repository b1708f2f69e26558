"""A large linear layer: its gradients are those of torch's, and those of later micro-batches need no second one."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire.models import large_linear
from thinwire.models.large_linear import LargeLinear, add_in_place


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> nn.Linear:
    monkeypatch.setattr(large_linear, "LARGE", 5 * 3)
    head = nn.Linear(3, 5, bias=False)
    add_in_place(nn.Sequential(head))
    return head


def batch(seed: int) -> torch.Tensor:
    return torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(seed))


class Shapes(TorchDispatchMode):
    """The shapes of all that was computed out of place."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.Size]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.seen.append((func.overloadpacket.__name__, result.shape))
        return result


def test_gradients_of_several_microbatches_are_those_of_torch(head: nn.Linear) -> None:
    assert type(head) is LargeLinear
    plain = nn.Linear(3, 5, bias=False)
    plain.load_state_dict(head.state_dict())
    for seed in range(3):
        given, same = batch(seed).requires_grad_(), batch(seed).requires_grad_()
        head(given).square().sum().backward()
        plain(same).square().sum().backward()
        assert given.grad is not None
        torch.testing.assert_close(given.grad, same.grad)
    assert head.weight.grad is not None
    torch.testing.assert_close(head.weight.grad, plain.weight.grad)


def test_a_later_microbatch_computes_no_second_gradient(head: nn.Linear) -> None:
    head(batch(0)).sum().backward()
    first = head.weight.grad
    with Shapes() as shapes:
        head(batch(1)).sum().backward()
    assert head.weight.grad is first
    assert [name for name, shape in shapes.seen if shape == (5, 3) and name != "detach"] == ["addmm_"]


def test_a_gradient_that_is_asked_for_is_returned_and_not_added(head: nn.Linear) -> None:
    head(batch(0)).sum().backward()
    assert head.weight.grad is not None
    before = head.weight.grad.clone()
    given = batch(1).requires_grad_()
    [of_weight] = torch.autograd.grad(head(given).sum(), [head.weight])
    [of_input] = torch.autograd.grad(head(given).sum(), [given])
    assert torch.equal(head.weight.grad, before)
    torch.testing.assert_close(of_weight, batch(1).sum((0, 1)).expand(5, 3))
    torch.testing.assert_close(of_input, head.weight.sum(0).expand(2, 4, 3))


def test_products_of_another_type_and_watched_gradients_are_those_of_torch(head: nn.Linear) -> None:
    seen: list[torch.Tensor] = []
    head(batch(0)).sum().backward()
    head.weight.register_hook(seen.append)
    head(batch(1)).sum().backward()
    torch.testing.assert_close(seen[0], batch(1).sum((0, 1)).expand(5, 3))
    with torch.autocast("cpu", torch.bfloat16):
        assert head(batch(2)).dtype == torch.bfloat16


def test_small_layers_and_those_with_a_bias_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_linear, "LARGE", 15)
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(3, 4, bias=False))
    add_in_place(module)
    assert [type(each) for each in module] == [nn.Linear, nn.Linear]
