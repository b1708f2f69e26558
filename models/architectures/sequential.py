"""Any model that runs its modules in order, made by your own function: "module:factory" in a recipe."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from thinwire.errors.imports import find
from thinwire.models.digest import tensor_lines
from thinwire.models.errors import ModelError, require
from thinwire.models.layers import Blueprint, Chain, Initialize, LayerSpec, parameters_on_meta
from thinwire.models.source import ModelSource, Use, with_weights
from thinwire.models.tensors import holds_parameters


class FactorySource(ModelSource):
    """A model that a function of the user makes."""

    @cached_property
    def _made(self) -> Blueprint:
        return factory_blueprint(self.options.name, self.options.config)

    @property
    def parameters(self) -> int:
        """The parameters of the whole model. ModelError if the function fails."""
        return int(sum(layer.cost for layer in self._made.layers))

    def code(self, num_labels: int | None) -> str:
        """Lines of Python that make the unsplit model as the variable `model`."""
        module, _, factory = self.options.name.partition(":")
        given = ", ".join(f"{name}={value!r}" for name, value in self.options.config.items())
        return (
            f"from torch import nn\n\nfrom {module} import {factory}\n\nmade = {factory}({given})\n"
            "model = made if isinstance(made, nn.Sequential) else nn.Sequential(*made)"
        )

    def _layers(self, use: Use) -> Blueprint:
        return with_weights(self._made, self.options)


def factory_blueprint(path: str, config: Mapping[str, Any]) -> Blueprint:
    """The model that a function makes: an nn.Sequential, or a list of modules to be run in order.

    Each child is a layer. Layers and tensors have the names of the nn.Sequential ("0", "0.weight"; the same for a
    list). A child's arguments are the result of the child before it, a tensor or a tuple of tensors. The function is
    called once for each layer that a stage builds, and only that layer is kept.

    Fresh weights come from the `reset_parameters` of each module that holds parameters, or from a function
    `initialize(full_name, module)` beside the factory, which must then fill every parameter. Values that constructors
    draw are lost, because they would depend on the order of construction. Buffers stay as constructed, with torch's
    generator in the same state at each call. Operations in place are done out of place: a stage may begin with one, and
    gradients are sent back for its input. A layer's cost is its number of parameters;
    `thinwire.models.costs.operations` is more exact, once the model's input is known.

    Args:
        path: "module:factory"; the module is imported, from the current directory too.
        config: the function's keyword arguments.

    Raises:
        ModelError: there is no such function, or its result cannot be run in order.
    """
    module, factory = _find(path)
    make: Callable[[], object] = partial(_made, partial(factory, **config))
    try:
        inspect.signature(factory).bind(**config)
    except TypeError as error:
        raise ModelError(f"{path} does not take the config {dict(config)}: {error}") from error
    try:
        with parameters_on_meta():
            returned = make()
    except (Exception, SystemExit) as error:
        raise ModelError(f"{path} failed with the config {dict(config)}: {type(error).__name__}: {error}") from error
    children = _children(path, returned)
    _check_buffers(path, children, make)
    own_initialize: Initialize | None = getattr(module, "initialize", None)
    _check(path, children, own_initialize is not None)
    layers = tuple(
        LayerSpec(name, partial(_build, path, make, name), float(sum(p.numel() for p in child.parameters())))
        for name, child in children.items()
    )
    return Blueprint(layers, partial(_initialize, own_initialize), counted=False)


def _find(path: str) -> tuple[ModuleType, Callable[..., object]]:
    factory = find(path, ModelError, "model.name")
    if not callable(factory):
        raise ModelError(f"{path} must be a function, got {type(factory).__name__}")
    return sys.modules[path.partition(":")[0]], factory


def _made(factory: Callable[[], object]) -> object:
    """What the factory returns with torch's generator in one state: all processes then draw the same buffers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return factory()


def _check_buffers(path: str, children: Mapping[str, nn.Module], make: Callable[[], object]) -> None:
    """Call the factory again, and raise ModelError if a buffer has other values, as it would in other processes."""
    first = _buffers(children)
    if not first:
        return
    with parameters_on_meta():
        second = _buffers(_children(path, make()))
    if changed := [name for name, line in first.items() if second.get(name) != line]:
        raise ModelError(
            f"buffers of {path} must have the same values at each call, got others in {', '.join(changed)}; draw them "
            "with torch, or from a generator with a seed of its own"
        )


def _buffers(children: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """What `tensor_lines` lists of each buffer, by its name."""
    buffers = {f"{name}.{inner}": b for name, child in children.items() for inner, b in child.named_buffers()}
    return {name: tensor_lines({name: buffer}) for name, buffer in buffers.items() if not buffer.is_meta}


def _children(path: str, returned: object) -> dict[str, nn.Module]:
    if isinstance(returned, nn.Sequential):
        own_forward = type(returned).forward is not nn.Sequential.forward
        own_tensors = [name for name, _ in (*returned.named_parameters(), *returned.named_buffers()) if "." not in name]
        require(
            (not own_forward, f"{path} must return an nn.Sequential with the forward of nn.Sequential, got its own"),
            (not own_tensors, f"every tensor of {path} must belong to a child, got {', '.join(own_tensors)}"),
        )
        # unlike named_children, this keeps a module that comes twice
        children = dict(zip(returned._modules, returned, strict=True))
    elif isinstance(returned, list | tuple) and all(isinstance(child, nn.Module) for child in returned):
        children = {str(index): child for index, child in enumerate(returned)}
    else:
        raise ModelError(f"{path} must return an nn.Sequential or a list of modules, got {type(returned).__name__}")
    require((len(children) > 0, f"{path} must return at least one module, got none"))
    return children


def _check(path: str, children: Mapping[str, nn.Module], has_initialize: bool) -> None:
    holders = Counter(id(tensor) for child in children.values() for tensor in set(child.parameters()))
    sharing = [
        name for name, child in children.items() if any(holders[id(tensor)] > 1 for tensor in child.parameters())
    ]
    unfilled = [
        f"{name}.{inner}" if inner else name
        for name, child in children.items()
        for inner, module in child.named_modules()
        if holds_parameters(module) and _find_reset(module) is None
    ]
    require(
        (not sharing, f"layers of {path} must not share parameters, got {', '.join(sharing)}; put them into one layer"),
        (
            has_initialize or not unfilled,
            f"{', '.join(unfilled)} of {path} must have a method reset_parameters that fills its parameters (what its "
            "constructor draws is lost); or define initialize(full_name, module) beside the factory",
        ),
    )


def _find_reset(module: nn.Module) -> Callable[[], None] | None:
    # nn.MultiheadAttention hides its own
    method: Callable[[], None] | None = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    return method


def _initialize(own: Initialize | None, full_name: str, module: nn.Module) -> None:
    """Fill one module by the function beside the factory, if there is one, else by the module's own method."""
    if own is not None:
        if holds_parameters(module):
            own(full_name, module)
        return
    reset = _find_reset(module)
    # a container may fill its children anew, or have nothing to say
    if reset is not None:
        reset()


def _build(path: str, make: Callable[[], object], name: str) -> Chain:
    child = _children(path, make())[name]
    for module in child.modules():
        if "inplace" in vars(module):
            vars(module)["inplace"] = False
    return Chain({name: child})
