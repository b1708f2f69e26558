"""A GridQuantizer whose tensors are encoded by one kernel and decoded by one, where there are kernels for them.

On a GPU they are those of kernels.py, of a whole tensor; on a CPU those of cpu.py, of a part. Everything else goes the
eager way: other grids and widths, blocks that end inside a byte, float64. Which way a tensor goes follows from the
grid, the blocks, the dtype and the device. What is decoded is the same, bit for bit; payloads may differ in the sign of
a scale of zero, and in the bits of NaN.
"""

from collections.abc import Mapping
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from thinwire.compress.codec import NO_KEY, Key, Words
from thinwire.compress.codecs.fused import cpu
from thinwire.compress.codecs.fused.trial import is_gpu, work
from thinwire.compress.codecs.granularity import BlockRange, Blocks, Per, blocks_per
from thinwire.compress.codecs.grid import AbsMaxGrid, Grid, MinMaxGrid
from thinwire.compress.codecs.quantizer import GridQuantizer

_GRIDS: Mapping[Grid, bool] = MappingProxyType(
    {make(bits, False): make is MinMaxGrid for bits in (2, 4, 8) for make in (AbsMaxGrid, MinMaxGrid)}
)
"""The grids that have kernels, without noise -> whether their scale is a minimum and a range."""
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_MOST_ELEMENTS = 1 << 30
"""Kernels count the elements of a block in 32 bits."""


class FusedQuantizer(GridQuantizer):
    """A quantizer on a grid, by kernels where there are some."""

    def encode(self, x: Tensor, out: Tensor, key: Key) -> None:
        """Write each block's scale, then the codes."""
        blocks = self.blocks(x.shape)
        if is_gpu(x.device) and covers(self.grid, blocks, x.dtype) and _work_on(x.device, self.grid, x.dtype):
            with torch.cuda.device(x.device):
                encode_fused(self.grid, blocks, x, out)
        else:
            super().encode(x, out, key)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the values of the codes, scaled, into `out`."""
        blocks = self.blocks(out.shape)
        if is_gpu(out.device) and covers(self.grid, blocks, out.dtype) and _work_on(out.device, self.grid, out.dtype):
            with torch.cuda.device(out.device):
                decode_fused(self.grid, blocks, payload, out)
        else:
            super().decode(payload, out)

    def encode_with_error(self, x: Tensor, error: Tensor, decay: float, out: Tensor) -> bool:
        """Write each block's scale and the codes, and what they lose in place of the error, by a kernel."""
        blocks = self.blocks(x.shape)
        kept, size = error.view(-1), self.grid.scales_size(blocks.count)
        if not cpu.covers_error(self.grid, blocks.whole, kept):
            return False
        values = x.detach().reshape(-1).float()
        cpu.encode(self.grid, blocks.whole, values, None, out[:size], out[size:], kept, decay)
        return True

    def write_part(
        self, part: BlockRange, elements: Tensor, scales: Tensor | None, words: Words | None, room: Tensor, out: Tensor
    ) -> None:
        """Write the packed codes of a part's elements into `out`, and their scales into `room` if none are given."""
        if words is None and cpu.covers(self.grid, part, elements):
            cpu.encode(self.grid, part, elements, scales, room, out)
        else:
            super().write_part(part, elements, scales, words, room, out)

    def read_part(self, part: BlockRange, room: Tensor, packed: Tensor, out: Tensor) -> None:
        """Write the values of a part's packed codes into `out` [n]; their scales are in `room`."""
        if cpu.covers(self.grid, part, out):
            cpu.decode(self.grid, part, room, packed, out)
        else:
            super().read_part(part, room, packed, out)


def covers(grid: Grid, blocks: Blocks, dtype: torch.dtype) -> bool:
    """Whether there are kernels for this: a byte must not have codes of two blocks."""
    whole_bytes = blocks.count == 1 or blocks.inner * grid.bits % 8 == 0
    counted = 0 < blocks.numel < _MOST_ELEMENTS
    return grid in _GRIDS and dtype in _DTYPES and blocks.outer == 1 and whole_bytes and counted


def encode_fused(grid: Grid, blocks: Blocks, x: Tensor, out: Tensor) -> None:
    """Write the payload of `x` by a kernel; the scales of blocks too long for a program come before it."""
    from thinwire.compress.codecs.fused import kernels

    measured = blocks.inner > kernels.LONGEST
    if measured:
        out[: grid.scales_size(blocks.count)] = grid.pack_scales(grid.measure(blocks.view(x.float())))
    kernels.encode(x.contiguous(), out, blocks.count, blocks.inner, grid.bits, _GRIDS[grid], measured)


def decode_fused(grid: Grid, blocks: Blocks, payload: Tensor, out: Tensor) -> None:
    """Write the decoded tensor into `out` by a kernel."""
    from thinwire.compress.codecs.fused import kernels

    kernels.decode(payload, out, blocks.count, blocks.inner, grid.bits, _GRIDS[grid])


def _work_on(device: torch.device, grid: Grid, dtype: torch.dtype) -> bool:
    """Whether these kernels work on this device."""
    return is_gpu(device) and work("triton", f"q({grid.bits}) on {device}", _agree, device, grid, dtype)


def _agree(device: torch.device, grid: Grid, dtype: torch.dtype) -> bool:
    """Whether kernels and eager code give the same payloads and values for a small tensor."""
    with torch.cuda.device(device):
        return all(_agree_for(device, grid, dtype, per) for per in ("row", "tensor"))


def _agree_for(device: torch.device, grid: Grid, dtype: torch.dtype, per: Per) -> bool:
    """Whether kernels and eager code give the same payload and values for a small tensor."""
    x = torch.linspace(-3, 2, 64 * 1024, dtype=torch.float32, device=device).sin().view(64, 1024).to(dtype)
    blocks = blocks_per(per, x.shape)
    eager = GridQuantizer(grid, lambda shape: blocks)
    payloads = torch.zeros(2, eager.nbytes(x.shape), dtype=torch.uint8, device=device)
    decoded = torch.zeros(2, prod(x.shape), dtype=dtype, device=device)
    eager.encode(x, payloads[0], NO_KEY)
    eager.decode(payloads[0], decoded[0])
    encode_fused(grid, blocks, x, payloads[1])
    decode_fused(grid, blocks, payloads[0], decoded[1])
    return torch.equal(payloads[0], payloads[1]) and torch.equal(decoded[0], decoded[1])
