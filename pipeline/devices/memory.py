"""The memory of a stage on its device: its peak, a sentence where there is none left, and gradients that share some."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from thinwire.pipeline.errors import MemoryFullError

_OF_CPU = "DefaultCPUAllocator"
"""How torch names its allocator where the memory of a host is full; there is no class for that error."""


class GradientsApart:
    """Gives each gradient of a stage memory of its own.

    torch gives parameters that are added, as in `a.view(-1) + b.view(-1)`, gradients that lie in one memory. The next
    micro-batch's would be added to both in each, and clipping would scale both twice. Gradients that lie side by side
    in one buffer stay there.
    """

    def __init__(self) -> None:
        self._parameters: tuple[Parameter, ...] = ()
        self._known = 0

    def begin(self, parameters: Iterable[Parameter]) -> None:
        """Say that a pass begins: gradients may have been cleared since the last one, and modules wrapped."""
        self._parameters = tuple(parameter for parameter in parameters if parameter.requires_grad)
        self._known = 0

    def look(self) -> None:
        """Look at those that came since the last look; call it after each backward. The look is short if none did."""
        if self._known == len(self._parameters):
            return
        present = [parameter for parameter in self._parameters if parameter.grad is not None]
        if len(present) == self._known:
            return
        self._known = len(present)
        placed = [(place, index) for index, one in enumerate(present) if (place := _memory(one.grad)) is not None]
        end = 0
        for (start, stop), index in sorted(placed):
            if start < end:
                gradient = present[index].grad
                assert gradient is not None, "it is present"
                present[index].grad = gradient.clone()
            else:
                end = stop


def _memory(gradient: Tensor | None) -> tuple[int, int] | None:
    """The addresses that a gradient lies between, of this process's part of it; None if it has none, or is sparse."""
    if isinstance(gradient, DTensor):
        gradient = gradient.to_local()
    if gradient is None or gradient.layout != torch.strided or not gradient.nbytes:
        return None
    start, nbytes = gradient.data_ptr(), gradient.nbytes
    if not gradient.is_contiguous():
        last = sum((size - 1) * stride for size, stride in zip(gradient.shape, gradient.stride(), strict=True))
        nbytes = (last + 1) * gradient.element_size()
    return start, start + nbytes


def peak_memory() -> int:
    """The most bytes of the host's memory that this process has had, pages of files included.

    On Linux the kernel's own figure, for `ru_maxrss` counts what the program had that started this one.
    """
    with suppress(OSError):
        if found := re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE):
            return 1024 * int(found[1])
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def peak_on_gpu(device: torch.device) -> int | None:
    """The most bytes of tensors that this process has had on its GPU; None on the CPU."""
    if device.type == "cpu":
        return None
    return int(torch.get_device_module(device).max_memory_allocated(device))


class told_if_full:
    """Turns torch's error of a full memory, from what runs inside, into a sentence.

    Raises:
        MemoryFullError: the device has no memory left; the sentence names the stage, its bytes and ways out.
    """

    def __init__(self, stage: int, device: torch.device) -> None:
        self._stage, self._device = stage, device

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if _is_full(error):
            raise MemoryFullError(
                f"stage {self._stage} needs more memory than there is on {self._device}: {_held(self._device)}; lower "
                f"pipeline.microbatch_size, set training.recompute to block, or raise pipeline.num_stages"
            ) from error


def _is_full(cause: BaseException | None) -> bool:
    """Whether this error, or one that it comes from, is that of a full memory: torch's pipeline wraps errors."""
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError) or (isinstance(cause, RuntimeError) and _OF_CPU in str(cause)):
            return True
        cause = cause.__cause__
    return False


def _held(device: torch.device) -> str:
    """The bytes that this process holds, in words."""
    if device.type == "cpu":
        return f"its process has had {peak_memory() / 1e9:.1f} GB at most"
    module = torch.get_device_module(device)
    _, there = module.mem_get_info(device)
    return f"its process holds {module.memory_allocated(device) / 1e9:.1f} GB of {there / 1e9:.1f} GB"
