"""What kernels do on a CPU: cpu_kernels.py, if Numba is installed.

They encode and decode parts of tensors, and advance an error while they encode.

The eager code is what the kernels must equal, and does everything else: short blocks, blocks that lie apart, noise,
more than a few threads, whatever torch traces or compiles, and the first messages of a process.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.compress.codec import NO_KEY
from thinwire.compress.codecs.fused.trial import work
from thinwire.compress.codecs.granularity import BlockRange, Blocks
from thinwire.compress.codecs.grid import Grid
from thinwire.compress.codecs.quantizer import GridQuantizer

LEAST_ELEMENTS, LEAST_MESSAGES = 1 << 18, 2000
"""A process loads the kernels with the first tensor of so many elements, or when it has coded so many messages: loading
takes a second, and that is what they save in so many short messages."""
_LEAST_BLOCK = 16
_MOST_THREADS = 2
"""The kernels use one thread; with more than this, torch's are as fast together on long tensors."""
_NONE = torch.empty(0, dtype=torch.float32)


def covers(grid: Grid, part: BlockRange, elements: Tensor) -> bool:
    """Whether kernels encode and decode the float32 `elements` [n] of a part."""
    return takes(elements, *part.shape[::2]) and _known(grid) and work("numba", "the CPU", _agree, grid)


def takes(elements: Tensor, outer: int, inner: int) -> bool:
    """Whether kernels may see elements in such blocks: those of a CPU that lie side by side, and are not traced.

    Counts them: this is asked for each message.
    """
    if (
        type(elements) is not Tensor
        or elements.device.type != "cpu"
        or outer != 1
        or inner < _LEAST_BLOCK
        or torch.compiler.is_compiling()
        or (elements.numel() >= LEAST_ELEMENTS and torch.get_num_threads() > _MOST_THREADS)
    ):
        return False
    _coded.messages += LEAST_MESSAGES if elements.numel() >= LEAST_ELEMENTS else 1
    return _coded.messages >= LEAST_MESSAGES


@dataclass
class _Coded:
    """What this process has encoded and decoded; a long message counts as many short ones."""

    messages: int = 0


_coded = _Coded()


def encode(
    grid: Grid,
    part: BlockRange,
    elements: Tensor,
    scales: Tensor | None,
    room: Tensor,
    out: Tensor,
    error: Tensor = _NONE,
    decay: float = 1.0,
) -> None:
    """Write the packed codes of elements [n] into `out`, and their scales into `room` if none are given.

    With an `error` [n], these are the codes of u = elements + decay * error, and u - C(u) takes its place. By steps of
    their own, message, payload and new error read or write all of a tensor eleven times; this, three times and the
    payload.
    """
    from thinwire.compress.codecs.fused import cpu_kernels

    values, inner = elements.contiguous().numpy(), part.shape[2]
    if scales is None and (rule := grid.measuring) is not None:
        cpu_kernels.encode(
            values, error.numpy(), np.float32(decay), inner, int(rule), grid.bits, room.numpy(), out.numpy()
        )
        return
    if scales is None:
        scales = part.measured(elements, grid.measure)
        room.copy_(grid.pack_scales(scales))
    coding = grid.coding(scales)
    assert coding is not None, "covers asks for it"
    cpu_kernels.encode_scaled(
        values, inner, int(coding.rule), _array(coding.divisors), _array(_or_zeros(coding.shifts, len(scales))),
        grid.bits, out.numpy(),
    )  # fmt: skip


def decode(grid: Grid, part: BlockRange, room: Tensor, packed: Tensor, out: Tensor) -> None:
    """Write the values of packed codes into `out` [n]; their scales are in `room`."""
    from thinwire.compress.codecs.fused import cpu_kernels

    if (rule := grid.measuring) is not None:
        cpu_kernels.decode(room.numpy(), packed.numpy(), part.shape[2], int(rule), grid.bits, out.numpy())
        return
    scales = grid.unpack_scales(room, part.shape[1])
    valuing, (factors, shifts) = grid.valuing, grid.factors(scales)
    assert valuing is not None, "covers asks for it"
    cpu_kernels.decode_scaled(
        packed.numpy(), part.shape[2], int(valuing.rule), np.float32(valuing.first), np.float32(valuing.second),
        _array(factors), _array(_or_zeros(shifts, len(scales))), grid.bits, out.numpy(),
    )  # fmt: skip


def covers_error(grid: Grid, part: BlockRange, elements: Tensor) -> bool:
    """Whether the kernel takes blocks of elements [n], and of errors that lie in the same way."""
    return (
        covers(grid, part, elements) and grid.measuring is not None and work("numba", "feedback", _errors_agree, grid)
    )


def _or_zeros(shifts: Tensor | None, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float32) if shifts is None else shifts


def _array(numbers: Tensor) -> NDArray[np.float32]:
    """The memory of a tensor, so that kernels write into it if it was contiguous."""
    array: NDArray[np.float32] = numbers.contiguous().view(-1).numpy()
    return array


@cache
def _known(grid: Grid) -> bool:
    """Whether the kernels know this grid."""
    scales = grid.measure(_sample().view(1, 64, 64))
    return not grid.stochastic and grid.coding(scales) is not None and grid.valuing is not None


def _sample() -> Tensor:
    """64 blocks of 64 elements to try kernels on."""
    return torch.linspace(-3, 2, 64 * 64, dtype=torch.float32).sin()


def _eager(grid: Grid) -> tuple[GridQuantizer, BlockRange]:
    """The eager code for the sample, and the sample as one part."""
    blocks = Blocks(64 * 64, 1, 64, 64)
    return GridQuantizer(grid, lambda shape: blocks), blocks.whole


def _agree(grid: Grid) -> bool:
    """Whether kernels and eager code give the same scales, codes and values."""
    (eager, part), sample, size = _eager(grid), _sample(), grid.scales_size(64)
    payloads = torch.zeros(3, eager.nbytes(sample.shape), dtype=torch.uint8)
    values = torch.zeros(3, len(sample), dtype=torch.float32)
    eager.encode(sample, payloads[0], NO_KEY)
    eager.decode(payloads[0], values[0])
    scales = grid.unpack_scales(payloads[0, :size], 64)
    payloads[2, :size] = payloads[0, :size]
    for payload, out, given in zip(payloads[1:], values[1:], (None, scales), strict=True):
        encode(grid, part, sample, given, payload[:size], payload[size:])
        decode(grid, part, payload[:size], payload[size:], out)
    return all(torch.equal(payloads[0, size:], one[size:]) for one in payloads[1:]) and len(values.unique(dim=0)) == 1


def _errors_agree(grid: Grid) -> bool:
    """Whether kernel and eager code give the same payload and errors."""
    (eager, part), values, size = _eager(grid), _sample(), grid.scales_size(64)
    errors = torch.linspace(2, -1, 2 * 64 * 64, dtype=torch.float32).cos().mul_(0.1).view(2, -1)
    payloads = torch.zeros(2, eager.nbytes(values.shape), dtype=torch.uint8)
    for error, decay in zip(errors, (1.0, 0.95), strict=True):
        message = values + error if decay == 1 else torch.mul(error, decay).add_(values)
        eager.encode(message, payloads[0], NO_KEY)
        decoded = torch.empty_like(message)
        eager.decode(payloads[0], decoded)
        encode(grid, part, values, None, payloads[1, :size], payloads[1, size:], error, decay)
        if not torch.equal(payloads[0], payloads[1]) or not torch.equal(error, message.sub_(decoded)):
            return False
    return True
