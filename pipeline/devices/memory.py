"""The memory of a stage on its device: its peak, a sentence where there is none left, and gradients that share some."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from thinwire.pipeline.errors import MemoryFullError

_OF_CPU = "DefaultCPUAllocator"
"""How torch names its allocator where the memory of a host is full; there is no class for that error."""


class GradientsApart:
    """Gives each gradient of a stage memory of its own.

    torch gives parameters that are added, as in `a.view(-1) + b.view(-1)`, gradients that lie in one memory; where the
    backward is split, `a + b` is enough. The next micro-batch's would be added to both in each, and clipping would
    scale both twice.
    """

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self._parameters = tuple(parameters)
        self._known = 0

    def begin(self) -> None:
        """Say that a pass begins: gradients may have been cleared since the last one."""
        self._known = 0

    def look(self) -> None:
        """Look at those that came since the last look; call it after each backward. The look is short if none did."""
        if self._known == len(self._parameters):
            return
        present = [parameter for parameter in self._parameters if parameter.grad is not None]
        if len(present) == self._known:
            return
        self._known = len(present)
        taken: set[int] = set()
        for parameter in present:
            place = _memory(parameter.grad)
            if place in taken:
                assert parameter.grad is not None, "it is present"
                parameter.grad = parameter.grad.clone()
            elif place is not None:
                taken.add(place)


def _memory(gradient: Tensor | None) -> int | None:
    """The address of the memory that a gradient is in, alone or with others; None if it has none, or is sparse."""
    if gradient is None or gradient.layout != torch.strided:
        return None
    return gradient.untyped_storage().data_ptr() or None


def peak_on_card(device: torch.device) -> int | None:
    """The most bytes of tensors that this process has had on its card; None on the CPU."""
    if device.type == "cpu":
        return None
    return int(torch.get_device_module(device).max_memory_allocated(device))


@contextmanager
def told_if_full(stage: int, device: torch.device) -> Iterator[None]:
    """Turn torch's error of a full memory, from what runs inside, into a sentence.

    Raises:
        MemoryFullError: the device has no memory left; the sentence names the stage, its bytes and ways out.
    """
    try:
        yield
    except Exception as error:
        if not _is_full(error):
            raise
        raise MemoryFullError(
            f"stage {stage} needs more memory than there is on {device}: {_held(device)}; lower "
            f"pipeline.microbatch_size, set training.recompute to block, or raise pipeline.num_stages"
        ) from error


def _is_full(error: BaseException) -> bool:
    """Whether this error, or one that it comes from, is that of a full memory: torch's pipeline wraps errors."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError) or (isinstance(cause, RuntimeError) and _OF_CPU in str(cause)):
            return True
        cause = cause.__cause__
    return False


def _held(device: torch.device) -> str:
    """The bytes that this process holds, in words."""
    if device.type == "cpu":
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return f"its process has had {resident / 1e9:.1f} GB at most"
    module = torch.get_device_module(device)
    _, there = module.mem_get_info(device)
    return f"its process holds {module.memory_allocated(device) / 1e9:.1f} GB of {there / 1e9:.1f} GB"
