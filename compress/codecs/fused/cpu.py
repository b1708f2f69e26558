"""What kernels do on a CPU: cpu_kernels.py, if Numba is installed.

The eager code is what the kernels must equal, and does everything else: short blocks, blocks that lie apart, noise,
more than a few threads, whatever torch traces or compiles, and the first messages of a process.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.compress.codec import NO_KEY, Words
from thinwire.compress.codecs.fused.trial import work
from thinwire.compress.codecs.granularity import BlockRange, Blocks
from thinwire.compress.codecs.grid import Grid
from thinwire.compress.codecs.quantizer import GridQuantizer

LEAST_ELEMENTS, LEAST_MESSAGES = 1 << 18, 2000
"""A process loads the kernels with the first tensor of so many elements, or when it has coded so many messages: loading
takes a second, and that is what they save in so many short messages."""
_messages = 0
"""What this process has encoded and decoded; a long message counts as many short ones."""
_LEAST_BLOCK = 16
_MOST_THREADS = 2
"""The kernels use one thread; with more than this, torch's are as fast together on long tensors."""


class FusedQuantizer(GridQuantizer):
    """A quantizer on a grid, by kernels where there are some.

    Payloads are those of the eager code, but for the sign of a scale of zero, and the bits of NaN.
    """

    def write_part(
        self, part: BlockRange, elements: Tensor, scales: Tensor | None, words: Words | None, room: Tensor, out: Tensor
    ) -> None:
        """Write the packed codes of a part's elements into `out`, and their scales into `room` if none are given."""
        if words is None and covers(self.grid, part, elements):
            encode(self.grid, part, elements, scales, room, out)
        else:
            super().write_part(part, elements, scales, words, room, out)

    def read_part(self, part: BlockRange, room: Tensor, packed: Tensor, out: Tensor) -> None:
        """Write the values of a part's packed codes into `out` [n]; their scales are in `room`."""
        if covers(self.grid, part, out):
            decode(self.grid, part, room, packed, out)
        else:
            super().read_part(part, room, packed, out)


def covers(grid: Grid, part: BlockRange, elements: Tensor) -> bool:
    """Whether kernels encode and decode the float32 `elements` [n] of a part: on a CPU, side by side, and not traced.

    Counts them: this is asked for each message.
    """
    outer, _, inner = part.shape
    if (
        grid.measuring is None
        or grid.stochastic
        or type(elements) is not Tensor
        or elements.device.type != "cpu"
        or outer != 1
        or inner < _LEAST_BLOCK
        or torch.compiler.is_compiling()
        or (elements.numel() >= LEAST_ELEMENTS and torch.get_num_threads() > _MOST_THREADS)
    ):
        return False
    global _messages
    _messages += LEAST_MESSAGES if elements.numel() >= LEAST_ELEMENTS else 1
    return _messages >= LEAST_MESSAGES and work("numba", "the CPU", _agree, grid)


def encode(grid: Grid, part: BlockRange, elements: Tensor, scales: Tensor | None, room: Tensor, out: Tensor) -> None:
    """Write the packed codes of elements [n] into `out`, and their scales into `room` if none are given."""
    from thinwire.compress.codecs.fused import cpu_kernels

    values, inner = elements.contiguous().numpy(), part.shape[2]
    if scales is None:
        cpu_kernels.encode(values, inner, _rule(grid), grid.bits, room.numpy(), out.numpy())
        return
    coding = grid.coding(scales)
    shifts = torch.zeros(len(scales), dtype=torch.float32) if coding.shifts is None else coding.shifts
    cpu_kernels.encode_scaled(
        values, inner, int(coding.rule), _array(coding.divisors), _array(shifts),
        grid.bits, out.numpy(),
    )  # fmt: skip


def decode(grid: Grid, part: BlockRange, room: Tensor, packed: Tensor, out: Tensor) -> None:
    """Write the values of packed codes into `out` [n]; their scales are in `room`."""
    from thinwire.compress.codecs.fused import cpu_kernels

    cpu_kernels.decode(room.numpy(), packed.numpy(), part.shape[2], _rule(grid), grid.bits, out.numpy())


def _rule(grid: Grid) -> int:
    assert grid.measuring is not None, "covers asks for it"
    return int(grid.measuring)


def _array(numbers: Tensor) -> NDArray[np.float32]:
    """The numbers as one row."""
    array: NDArray[np.float32] = numbers.contiguous().view(-1).numpy()
    return array


def _agree(grid: Grid) -> bool:
    """Whether kernels and eager code give the same scales, codes and values, of 64 blocks of 64 elements."""
    blocks, size = Blocks(64 * 64, 1, 64, 64), grid.scales_size(64)
    eager, part = GridQuantizer(grid, lambda shape: blocks), blocks.whole
    sample = torch.linspace(-3, 2, 64 * 64, dtype=torch.float32).sin()
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
