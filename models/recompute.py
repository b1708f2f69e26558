"""Recomputation: a layer keeps its inputs only, and its backward computes again all else that it needs.

So a micro-batch that waits for its backward takes little memory. The layer runs forward twice. Its random numbers, and
so its dropout, are the same both times; its buffers change once only.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Recompute = Literal["none", "block"]
"""What a stage computes again in its backward: nothing, or each layer."""


def in_backward(layer: nn.Module, tensors: tuple[Tensor, ...], side: Mapping[str, Tensor]) -> Any:
    """Run a layer so that its backward runs it again. Without gradients it runs once, as ever.

    Its inputs are kept.
    """
    if not torch.is_grad_enabled():
        return layer(*tensors, **side)
    run: Callable[..., Any] = partial(layer, **side)  # torch has options that a side input might be called
    return checkpoint(run, *tensors, use_reentrant=False, context_fn=partial(_contexts, layer))


_Place = tuple[nn.Module, str]


def _contexts(layer: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of the forward and of each run in the backward."""
    moved: dict[_Place, Tensor] = {}
    return _noting(layer, moved), BuffersApart(layer, moved)


@contextmanager
def _noting(layer: nn.Module, moved: dict[_Place, Tensor]) -> Iterator[None]:
    """Note what buffers were that the forward moves: the next run of the same micro-batch begins with the same."""
    before = [
        (module, name, buffer, buffer._version, buffer.clone())
        for module in layer.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    yield
    for module, name, buffer, version, copy in before:
        if module._buffers.get(name) is not buffer or buffer._version != version:
            moved[module, name] = copy


class BuffersApart(AbstractContextManager[None]):
    """A context in which a module has copies of its buffers. So a batch norm counts no micro-batch twice.

    Those that the forward moved are as before it. The copies are there even for modules that change nothing: torch
    compares the tensors that both runs keep, and a missing one would be a difference.
    """

    def __init__(self, module: nn.Module, moved: Mapping[_Place, Tensor] | None = None) -> None:
        self._module, self._moved = module, {} if moved is None else moved
        self._put_back: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        for module in self._module.modules():
            own = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
            self._put_back.append(partial(module._buffers.update, own))
            module._buffers.update({name: self._moved.get((module, name), own[name]).clone() for name in own})

    def __exit__(self, *exception: object) -> None:
        while self._put_back:
            self._put_back.pop()()
