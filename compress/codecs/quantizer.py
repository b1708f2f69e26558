"""Quantizers: the parts of q and fp8.

payload of GridQuantizer     | scale of block 0 | .. | scale of the last block | codes, packed |
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from thinwire.compress.codec import Key, Words
from thinwire.compress.codecs.cast import rounding_bound, saturating_copy
from thinwire.compress.codecs.coding.bits import pack, packed_size, unpack
from thinwire.compress.codecs.granularity import BlockRange, Blocks
from thinwire.compress.codecs.grid import Grid

_PART, _PART_OF_GPU = 1 << 20, 1 << 25
"""Elements handled at a time. On a CPU what is made of them stays in a cache. On a GPU each part costs the host a dozen
launches, so parts are as long as its memory easily holds."""


class Quantizer(ABC):
    """A codec's inside, for floating-point tensors with at least one element; see Codec for the arguments."""

    @abstractmethod
    def nbytes(self, shape: Sequence[int]) -> int:
        """The exact payload size in bytes, the same for every dtype."""

    @abstractmethod
    def encode(self, x: Tensor, out: Tensor, key: Key) -> None:
        """Write the payload of `x` into `out`; `x` is not changed."""

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the decoded tensor into `out`, which is contiguous."""

    @abstractmethod
    def error_bound(self, x: Tensor) -> Tensor:
        """The largest error of each decoded element, as float32 in the shape of `x`."""


@dataclass(frozen=True)
class GridQuantizer(Quantizer):
    """A quantizer that makes each element a code on its block's grid."""

    grid: Grid
    blocks: Callable[[Sequence[int]], Blocks]
    """Gives the blocks of a tensor of this shape."""

    def nbytes(self, shape: Sequence[int]) -> int:
        """The size of all scales and of the packed codes."""
        return self.grid.scales_size(self.blocks(shape).count) + packed_size(prod(shape), self.grid.bits)

    def error_bound(self, x: Tensor) -> Tensor:
        """The grid's largest error, plus the rounding of the tensor's dtype."""
        blocks, elements = self.blocks(x.shape), x.float().reshape(-1)
        scales = blocks.whole.measured(elements, self.grid.measure)
        error, largest = self.grid.bound(blocks.view(elements), self._sent(scales))
        return blocks.spread(error + rounding_bound(largest, x.dtype), x.shape)

    def encode(self, x: Tensor, out: Tensor, key: Key) -> None:
        """Write each block's scale, then the codes."""
        blocks, grid, flat, most = self.blocks(x.shape), self.grid, x.reshape(-1), _part_on(x.device)
        size, scales = grid.scales_size(blocks.count), None
        if not blocks.are_whole(most):
            flat = flat.float()
            out[:size] = grid.pack_scales(blocks.whole.measured(flat, grid.measure))
            scales = grid.unpack_scales(out[:size], blocks.count)
        words = key.words(x.device) if grid.stochastic else None
        for part in blocks.parts(most):
            elements = flat[part.start : part.stop].float()
            given, place = None if scales is None else scales[part.blocks], out[self._codes_place(part, size)]
            self.write_part(part, elements, given, words, out[self._scales_place(part)], place)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the values of the codes, scaled, into `out`."""
        blocks, grid, flat = self.blocks(out.shape), self.grid, out.view(-1)
        size = grid.scales_size(blocks.count)
        for part in blocks.parts(_part_on(out.device)):
            place = flat[part.start : part.stop]
            values = place if out.dtype == torch.float32 else torch.empty_like(place, dtype=torch.float32)
            self.read_part(part, payload[self._scales_place(part)], payload[self._codes_place(part, size)], values)
            if values is not place:
                saturating_copy(values, place)

    def write_part(
        self, part: BlockRange, elements: Tensor, scales: Tensor | None, words: Words | None, room: Tensor, out: Tensor
    ) -> None:
        """Write the packed codes of a part's elements into `out`, and their scales into `room` if none are given."""
        grid, values = self.grid, part.padded(elements)
        if scales is None:
            scales = part.measured(elements, grid.measure)
            room.copy_(grid.pack_scales(scales))
        codes = grid.codes(values, scales, None if words is None else grid.noise(values, words))
        pack(codes.view(-1)[: len(elements)], grid.bits, out)

    def read_part(self, part: BlockRange, room: Tensor, packed: Tensor, out: Tensor) -> None:
        """Write the values of a part's packed codes into `out` [n]; their scales are in `room`."""
        values = out.new_empty(part.shape) if part.is_padded else out.view(part.shape)
        flat = values.view(-1)[: len(out)]
        self.grid.evaluate(flat.copy_(unpack(packed, self.grid.bits, len(flat))))
        self.grid.scale_levels(values, self.grid.unpack_scales(room, part.shape[1]))
        if part.is_padded:
            out.copy_(flat)

    def _sent(self, scales: Tensor) -> Tensor:
        """Scales as they arrive."""
        return self.grid.unpack_scales(self.grid.pack_scales(scales), len(scales))

    def _scales_place(self, part: BlockRange) -> slice:
        """Where a part's scales lie in a payload."""
        size = self.grid.scale_bytes
        return slice(part.blocks.start * size, part.blocks.stop * size)

    def _codes_place(self, part: BlockRange, after: int) -> slice:
        """Where a part's codes lie in a payload, after the scales."""
        bits = self.grid.bits
        return slice(after + packed_size(part.start, bits), after + packed_size(part.stop, bits))


def _part_on(device: torch.device) -> int:
    """The elements that are handled at a time on a device."""
    return _PART if device.type == "cpu" else _PART_OF_GPU
