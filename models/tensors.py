"""Other tensors in the place of a module's own: real ones for the meta device's, tensors without data, narrow ones."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


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


def hold_weights(
    module: nn.Module, dtype: torch.dtype, *, frozen_only: bool, wide: Callable[[str], bool] = lambda name: False
) -> None:
    """Give a module's floating-point parameters and persistent buffers this dtype.

    If `frozen_only`, parameters that train stay as they are. Batch norms do so always: their running statistics move by
    less than 16 bits can show. So do buffers that no checkpoint holds, such as rotary frequencies, and tensors whose
    names in the module are `wide`.
    """
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    as_they_are = {id(tensor) for norm in norms for tensor in norm.state_dict(keep_vars=True).values()}
    for name, tensor in module.state_dict(keep_vars=True).items():
        stays = wide(name) or id(tensor) in as_they_are or (frozen_only and tensor.requires_grad)
        if tensor.is_floating_point() and not stays:
            tensor.data = tensor.data.to(dtype)  # one at a time: the wide one is freed before the next is narrowed
