"""Quantizers: the parts of q and fp8. One works on a grid; another one around it sends outliers apart.

payload of GridQuantizer     | scale of block 0 | .. | scale of the last block | codes, packed |
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch import Tensor

from thinwire.compress.codec import Key, Words, is_finite, tensor_bytes
from thinwire.compress.codecs.cast import rounding_bound, saturating_copy
from thinwire.compress.codecs.coding.bits import ValueTable, pack, packed_size
from thinwire.compress.codecs.granularity import BlockRange, Blocks, blocks_per
from thinwire.compress.codecs.grid import Grid
from thinwire.compress.codecs.indices import (
    indices_size,
    largest_magnitudes,
    pack_indices,
    put_values,
    unpack_indices,
    values_at,
)

_PART, _PART_OF_GPU = 1 << 20, 1 << 25
"""Elements handled at a time. On a CPU what is made of them stays in a cache. On a GPU each part costs the host a dozen
launches, so parts are as long as its memory easily holds."""
_SHORT = 1 << 14
"""Elements that are looked at as fast as their scales."""


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

    def encode_with_error(self, x: Tensor, error: Tensor, decay: float, out: Tensor) -> bool:
        """As Codec.encode_with_error."""
        return False

    @abstractmethod
    def error_bound(self, x: Tensor) -> Tensor:
        """The largest error of each decoded element, as float32 in the shape of `x`."""

    def is_finite(self, payload: Tensor, decoded: Tensor) -> bool:
        """Whether no element of `decoded`, which `payload` was decoded into, is NaN or infinity."""
        return is_finite(decoded)


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
        padded = torch.empty(part.shape, dtype=torch.float32, device=out.device) if part.is_padded else None
        values = out.view(part.shape) if padded is None else padded
        flat = values.view(-1)[: len(out)]
        levels_of(self.grid, out.device).unpack(packed, flat)
        self.grid.scale_levels(values, self.grid.unpack_scales(room, part.shape[1]))
        if padded is not None:
            out.copy_(flat)

    def is_finite(self, payload: Tensor, decoded: Tensor) -> bool:
        """Whether no element of `decoded` is NaN or infinity; the scales of a long one mostly show it."""
        # in another dtype a finite value may round to infinity
        if decoded.dtype == torch.float32 and decoded.numel() > _SHORT:
            reach = self.grid.reach(self._scales(payload, self.blocks(decoded.shape)))
            if reach is not None and is_finite(reach):
                return True
        return is_finite(decoded)

    def _scales(self, payload: Tensor, blocks: Blocks) -> Tensor:
        """The scales in a payload."""
        return self.grid.unpack_scales(payload[: self.grid.scales_size(blocks.count)], blocks.count)

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


@cache
def levels_of(grid: Grid, device: torch.device) -> ValueTable:
    """The values of a grid's codes before scaling; cached, because a run has few grids."""
    return ValueTable(grid.bits, grid.evaluate, device)


@dataclass(frozen=True)
class OutliersApart(Quantizer):
    """q's option outliers=F: the largest elements of each row are sent apart, after LLM.int8 (2208.07339).

    payload     | outliers, bf16 | their indices | payload of the rest |        packed as indices.py says

    Rows are those of `per="row"`. Of a row's n elements the max(1, round(F*n)) of largest magnitude are outliers; of
    equals the first. They are sent in bf16 for its range: in fp16 a gradient's outliers may become zero, an
    activation's may be above 65504. Their places in the rest get a value that does not widen the grid: the value
    nearest to zero between the least and the largest of the block's rest.

    NaN counts as larger than any number. So if a row has no more NaN and infinities than outliers, they are decoded as
    they are, and change nothing around them.
    """

    inner: Quantizer
    fraction: float
    """The share of each row's elements that are outliers."""
    blocks: Callable[[Sequence[int]], Blocks]
    """The blocks of the inner quantizer."""

    def count(self, n: int) -> int:
        """How many of a row's `n` elements are outliers."""
        return max(1, round(self.fraction * n))

    def nbytes(self, shape: Sequence[int]) -> int:
        """The size of the outliers, of their indices and of the inner payload."""
        return sum(self._sizes(shape)) + self.inner.nbytes(shape)

    def encode(self, x: Tensor, out: Tensor, key: Key) -> None:
        """Write the outliers, their indices, and the inner payload of the rest."""
        rest, indices, outliers = self._split(x)
        values, packed, inner = self._parts(out, x.shape)
        values.copy_(tensor_bytes(outliers.bfloat16()))
        pack_indices(indices, rest.shape[1], packed)
        self.inner.encode(rest.view(x.shape), inner, key)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the rest, and the outliers in their places, computed in float32."""
        values = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        row = blocks_per("row", values.shape)
        sent, packed, inner = self._parts(payload, values.shape)
        self.inner.decode(inner, values)
        outliers = torch.empty(row.count, self.count(row.inner), dtype=torch.bfloat16, device=values.device)
        tensor_bytes(outliers).copy_(sent)
        indices = unpack_indices(packed, row.count, row.inner, self.count(row.inner))
        put_values(outliers.float(), indices, values)
        if values is not out:
            saturating_copy(values, out)

    def error_bound(self, x: Tensor) -> Tensor:
        """The inner quantizer's bound for the rest, and bf16's for outliers."""
        rest, indices, outliers = self._split(x)
        bound = self.inner.error_bound(rest.view(x.shape)).reshape(rest.shape)
        bound = put_values(rounding_bound(outliers.abs(), torch.bfloat16), indices, bound.clone())
        bound += rounding_bound(put_values(outliers, indices, rest).abs() + bound, x.dtype)
        return bound.view(x.shape)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rest [R, n], with the outliers' places filled, and the outliers' indices and values [R, k]."""
        row, blocks = blocks_per("row", x.shape), self.blocks(x.shape)
        values = x.detach().reshape(row.count, row.inner).float().contiguous()
        indices = largest_magnitudes(values, self.count(row.inner))
        outliers = values_at(indices, values)
        rest = put_values(torch.full_like(outliers, torch.inf), indices, values.clone())
        least = blocks.view(rest).amin((0, 2))
        most = blocks.view(put_values(torch.full_like(outliers, -torch.inf), indices, rest)).amax((0, 2))
        fill = torch.zeros_like(least).clamp_(least, most).masked_fill_(least > most, 0)
        fill = values_at(indices, blocks.spread(fill.unsqueeze(1), rest.shape))
        return put_values(fill, indices, rest), indices, outliers

    def _parts(self, payload: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """A payload's outliers, their indices, and the inner payload."""
        values_size, indices_bytes = self._sizes(shape)
        values, packed, inner = payload.tensor_split([values_size, values_size + indices_bytes])
        return values, packed, inner

    def _sizes(self, shape: Sequence[int]) -> tuple[int, int]:
        """The sizes of the outliers' values and of their indices."""
        row = blocks_per("row", shape)
        k = self.count(row.inner)
        return 2 * row.count * k, indices_size(row.count, row.inner, k)
