"""Other tensors in the place of a module's own: real ones for the meta device's, or tensors without data."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def as_tuple(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a module gives, as a tuple."""
    return value if isinstance(value, tuple) else (value,)


def holds_parameters(module: nn.Module) -> bool:
    """Whether a module has parameters of its own, beside those of modules in it."""
    return next(module.parameters(recurse=False), None) is not None


def replace_tensors(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer by the result of `make`. Modules that share a tensor still share it after."""
    made: dict[int, Tensor] = {}

    def replacement(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            new = make(tensor)
            keep = new is tensor or not isinstance(tensor, nn.Parameter)
            made[id(tensor)] = new if keep else nn.Parameter(new, tensor.requires_grad)
        return made[id(tensor)]

    # keep the old tensors alive, so Python uses no id twice
    old = [tensor for part in module.modules() for store in _stores(part) for tensor in store.values()]
    for part in module.modules():
        for store in _stores(part):
            store.update({name: replacement(tensor) for name, tensor in store.items() if tensor is not None})
    del old


def _stores(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers
