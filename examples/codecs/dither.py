"""Exponential dithering: each element becomes a sign and a power of two, rounded up or down by chance.

    thinwire simulate quickstart --codec 'q(8)/dither.Dither(4)'     in this folder

It helps where gradients must be unbiased though their sizes differ much within a row: with outliers it has 12 dB at 4
bits, where `q(4, round="stochastic")` has -1. Without outliers the latter is better from 4 bits on.

payload     | scale of block 0, bf16 | .. | scale of block C-1 | codes of all elements, packed as those of q |
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.compress.codec import Words, require_int
from thinwire.compress.codecs.blockwise import Blockwise
from thinwire.compress.codecs.coding.lengths import Code
from thinwire.compress.codecs.granularity import Per
from thinwire.compress.codecs.grid import Grid, PointGrid, bfloat16_above, largest_magnitude
from thinwire.errors import attempt

_MANTISSA_BITS = 23
_EXPONENT_BIAS = 127
_LEAST_NORMAL_EXPONENT = -126
_SMALLEST_SCALE = 2.0**-118


@dataclass(frozen=True, repr=False)
class Dither(Blockwise):
    """`dither.Dither(bits)`: exponential dithering, in its plainest form natural compression (1905.10988).

    The points of a block are 0 and +-s * 2**(c-m), with c from 1 to m = 2**(bits-1) - 1, and s = max|x| of the block as
    bf16, rounded up. A code is c, or 0 for zero, with the sign as its highest bit. A value becomes either of the points
    around it, by chance, so that the expectation is the value itself (as exactly as float32 holds x/s), and

        E|x - C(x)|**2 <= |x|**2 / 8       for |x| of at least the smallest nonzero point, p = s * 2**(1-m)
                       <= p**2 / 4         below

    No element is off by more than |x|, or p if that is more. float32 holds every decoded point exactly.

    To stay clear of denormal numbers, m is less where p would be below 2**-126, and a block whose s would be below
    2**-118 is decoded as zeros. NaN or infinity makes its whole block not finite.
    """

    bits: int
    """Bits a code, 2 to 8."""

    per: Per | None = field(default=None, kw_only=True)
    """What shares one scale; `row` if neither this nor `group` is given."""
    group: int | None = field(default=None, kw_only=True)
    """Instead of `per`: how many consecutive elements share one scale."""
    code: Code | None = field(default=None, kw_only=True)
    """`entropy`: frequent codes take fewer bits, so a payload may be shorter than `nbytes`."""

    def __post_init__(self) -> None:
        attempt(lambda: require_int(self, "bits", self.bits, 2, 8), super().__post_init__)

    @property
    def _grid(self) -> Grid:
        return DitherGrid(self.bits, stochastic=True)


class DitherGrid(PointGrid):
    """Zero and powers of two, of both signs."""

    @property
    def _top(self) -> int:
        """The largest code without its sign."""
        return (1 << (self.bits - 1)) - 1

    def measure(self, values: Tensor) -> Tensor:
        """max|x| of each block, as bf16 rounded up: [count, 1]."""
        return bfloat16_above(largest_magnitude(values), _SMALLEST_SCALE)

    def units(self, scales: Tensor) -> Tensor:
        """The scale, or more where m is less: code _top stands for 1, and code m must stand for s."""
        scales = scales.float()
        exponents = (scales.view(torch.int32) >> _MANTISSA_BITS) - _EXPONENT_BIAS
        unused = (self._top - 1 + _LEAST_NORMAL_EXPONENT - exponents).clamp_(0, self._top - 1)
        return torch.ldexp(scales, unused)

    def noise(self, values: Tensor, words: Words) -> Tensor:
        """Random mantissas: int32 of 23 bits in the shape of `values`, two cut from each 64-bit word."""
        mantissas = words((values.numel() + 1) // 2).view(torch.int32)[: values.numel()].view(values.shape)
        return mantissas.bitwise_and_((1 << _MANTISSA_BITS) - 1)

    def codes(self, values: Tensor, scales: Tensor, noise: Tensor | None) -> Tensor:
        """Zero or an exponent, up or down by chance, with the sign as the highest bit."""
        assert noise is not None, "dither rounds by chance"
        units, least = self.units(scales), 2.0 ** (1 - self._top)
        ratios = (values / units.masked_fill(units == 0, torch.inf)).abs_()
        # Random bits are added to a float's mantissa. If they carry, the exponent goes up: the farther the value from
        # the power of two below, the likelier. Below the least point that is 0, so the point itself is added.
        below = ratios.clamp(max=least).add_(least).view(torch.int32).add_(noise).bitwise_right_shift_(_MANTISSA_BITS)
        above = ratios.clamp_(min=least).view(torch.int32).add_(noise).bitwise_right_shift_(_MANTISSA_BITS)
        codes = above.add_(below).sub_(2 * (_EXPONENT_BIAS - self._top) + 2)
        sign = (values.view(torch.int32) >> 31).bitwise_and_(1 << (self.bits - 1))
        # Masked: NaN becomes any integer, and must not change the codes of another block.
        return codes.bitwise_and_(self._top).bitwise_or_(sign).to(torch.uint8)

    def points(self) -> Tensor:
        """Zero and powers of two up to 1, then the same negative: float32 [2**bits]."""
        powers = torch.ldexp(torch.ones(self._top, dtype=torch.float32), torch.arange(1 - self._top, 1))
        positive = torch.cat([torch.zeros(1, dtype=torch.float32), powers])
        return torch.cat([positive, -positive])

    def bound(self, values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """|x|, or the smallest nonzero point if that is more."""
        magnitude, least = values.abs(), self.units(scales) * 2.0 ** (1 - self._top)
        error = torch.maximum(magnitude, least) * (1 + 2.0**-20)
        return error, magnitude + error
