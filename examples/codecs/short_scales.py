"""Scales of half the size, for blocks so short that their scales are much of a payload.

    thinwire simulate quickstart --codec 'short_scales.ByteScales(4, group=32)/q(8)'     in this folder

It helps with groups of 32 or fewer: two bytes a block are then half a bit an element.

payload of ByteScales     | e | byte of block 0 | .. | byte of block C-1 | codes, packed as those of q |

A byte has 5 bits of exponent, counted down from the tensor's largest scale, and below them 3 bits of mantissa m:

    byte 0                0
    byte b of 1 to 254    (1 + m/8) * 2**(b//8 - 31 + e - 127)     m = b % 8
    byte 255              not a number

So scales may be 2**31 times smaller than the largest; those still smaller are rounded up to byte 1. Each is rounded up,
by at most an eighth, so no value lies outside its grid.

payload of ShortRanges    | least value, bf16 | range, bf16 | for each block, then the codes, packed as those of q |
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.compress import Key
from thinwire.compress.codec import require_int
from thinwire.compress.codecs.blockwise import Blockwise
from thinwire.compress.codecs.cast import saturating_copy
from thinwire.compress.codecs.coding.lengths import Code
from thinwire.compress.codecs.granularity import Per
from thinwire.compress.codecs.grid import AbsMaxGrid, Grid, MinMaxGrid
from thinwire.compress.codecs.quantizer import GridQuantizer, Quantizer
from thinwire.errors import attempt

_MANTISSA = 20
"""A float32, seen as an integer and shifted right by this, is its exponent and 3 bits of mantissa."""
_EXPONENTS = 31
_LEAST = 40
"""The least e, so that the smallest scale is no denormal number."""
_LARGEST, _NAN = 254, 255


@dataclass(frozen=True, repr=False)
class ByteScales(Blockwise):
    """`short_scales.ByteScales(bits)`: as `q(bits, grid="midrise")`, with scales of a byte."""

    bits: int
    """Bits a code, 1 to 8."""

    per: Per | None = field(default=None, kw_only=True)
    """What shares one scale; `row` if neither this nor `group` is given."""
    group: int | None = field(default=None, kw_only=True)
    """Instead of `per`: how many consecutive elements share one scale."""
    code: Code | None = field(default=None, kw_only=True)
    """`entropy`: frequent codes take fewer bits, so a payload may be shorter than `nbytes`."""

    def __post_init__(self) -> None:
        attempt(lambda: require_int(self, "bits", self.bits, 1, 8), super().__post_init__)

    @property
    def _grid(self) -> Grid:
        return ByteScaledGrid(self.bits, stochastic=False)

    @property
    def _quantizer(self) -> Quantizer:
        return AtOnce(self._grid, self._blocks)


@dataclass(frozen=True, repr=False)
class ShortRanges(Blockwise):
    """`short_scales.ShortRanges(bits)`: as `q(bits, scale="minmax")`, with the least value and the range in bf16.

    They are rounded to hold all, so the first and the last point may lie up to 0.8 % of the largest magnitude outside.
    """

    bits: int
    """Bits a code, 1 to 8."""

    per: Per | None = field(default=None, kw_only=True)
    """What shares one scale; `row` if neither this nor `group` is given."""
    group: int | None = field(default=None, kw_only=True)
    """Instead of `per`: how many consecutive elements share one scale."""
    code: Code | None = field(default=None, kw_only=True)
    """`entropy`: frequent codes take fewer bits, so a payload may be shorter than `nbytes`."""

    def __post_init__(self) -> None:
        attempt(lambda: require_int(self, "bits", self.bits, 1, 8), super().__post_init__)

    @property
    def _grid(self) -> Grid:
        return ShortMinMaxGrid(self.bits, stochastic=False)


class AtOnce(GridQuantizer):
    """A quantizer of a tensor in one part: the bytes of its scales depend on each other."""

    def encode(self, x: Tensor, out: Tensor, key: Key) -> None:
        """Write the scales, then the codes."""
        blocks, grid, flat = self.blocks(x.shape), self.grid, x.reshape(-1).float()
        size = grid.scales_size(blocks.count)
        out[:size] = grid.pack_scales(blocks.whole.measured(flat, grid.measure))
        scales = grid.unpack_scales(out[:size], blocks.count)
        self.write_part(blocks.whole, flat, scales, None, out[:size], out[size:])

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the values of the codes, scaled, into `out`."""
        blocks, values = self.blocks(out.shape), torch.empty(out.shape, dtype=torch.float32, device=out.device)
        size = self.grid.scales_size(blocks.count)
        self.read_part(blocks.whole, payload[:size], payload[size:], values.view(-1))
        saturating_copy(values, out)


@dataclass(frozen=True)
class ByteScaledGrid(AbsMaxGrid):
    """Mid-rise, with scales of a byte."""

    def scales_size(self, count: int) -> int:
        """A byte for each block, and one for all."""
        return 1 + count

    def pack_scales(self, scales: Tensor) -> Tensor:
        """The bytes of bf16 `scales` [count, 1]."""
        scales = scales.view(-1).float()
        largest = scales.masked_fill(~scales.isfinite(), 0.0).amax()
        # one more where the largest would become byte 255
        top = ((largest.view(torch.int32) + (1 << 21) - 1) >> 23).clamp_(min=_LEAST)
        rounded = (scales.view(torch.int32) + (1 << _MANTISSA) - 1) >> _MANTISSA
        packed = (rounded - ((top - _EXPONENTS) << 3)).clamp_(1, _LARGEST)
        packed.masked_fill_(scales == 0, 0).masked_fill_(~scales.isfinite(), _NAN)
        return torch.cat([top.view(1), packed]).to(torch.uint8)

    def unpack_scales(self, packed: Tensor, count: int) -> Tensor:
        """The scales in bytes that `pack_scales` wrote: float32 [count, 1]."""
        top, given = packed[0].int().clamp_(min=_LEAST), packed[1:].int()
        scales = ((given + ((top - _EXPONENTS) << 3)) << _MANTISSA).view(torch.float32)
        return scales.masked_fill_(given == 0, 0.0).masked_fill_(given == _NAN, torch.nan).unsqueeze(1)


class ShortMinMaxGrid(MinMaxGrid):
    """The points of MinMaxGrid, with the least value and the range as bf16, rounded to hold all."""

    scale_bytes = 4
    scale_dtype = torch.bfloat16
    measuring = None  # kernels write scales of float32

    def measure(self, values: Tensor) -> Tensor:
        """The least value, rounded down, and the range from there, rounded up, of each block: bf16 [count, 2]."""
        # of zeros with both signs, torch gives either; adding zero takes the sign away
        least, highest = values.amin((0, 2)) + 0.0, values.amax((0, 2)) + 0.0
        lowest = -_rounded_up(-least)
        return torch.stack([lowest, _rounded_up(highest - lowest.float())], 1)


def _rounded_up(x: Tensor) -> Tensor:
    """`x`, float32, as the next bf16 that is not below."""
    nearest = x.bfloat16()
    return torch.where(nearest < x, torch.nextafter(nearest, torch.full_like(nearest, torch.inf)), nearest)
