"""The codec fp8: each element in 8 bits with its own exponent, and one scale for each block."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compress.codecs.blockwise import Blockwise
from thinwire.compress.codecs.coding.lengths import Code
from thinwire.compress.codecs.granularity import Per
from thinwire.compress.codecs.grid import Grid, PointGrid, bfloat16_above, largest_magnitude

_LARGEST = 448
_SMALLEST_SCALE = 2.0**-117
_LARGEST_SCALE = 145 * 2.0**112


@dataclass(frozen=True, repr=False)
class Float8(Blockwise):
    """`fp8`: e4m3 (1 bit of sign, 4 of exponent, 3 of mantissa; the largest value is 448), ties to even.

    The scale f is max|x|/448 of the block as bf16, rounded up, so the largest value is sent as 448 or slightly less.
    No value lies outside. float32 holds the decoded product, of 4 bits and 8, exactly. The largest error is

        |x|/17      for |x| >= 2**-6 * f, that is, down to about 1/28700 of the block's largest
        f/2**10     below

    plus the rounding of the tensor's dtype. A block whose f would be below 2**-117 (max|x| < 2.7e-33) is decoded as
    zeros, to stay clear of denormal numbers. Values beyond 3.37e38 are cut to that, by at most 1 %, to stay finite.
    NaN or infinity makes its whole block not finite.
    """

    name: ClassVar[str] = "fp8"

    per: Per | None = field(default=None, kw_only=True)
    """What shares one scale; `row` if neither this nor `group` is given."""
    group: int | None = field(default=None, kw_only=True)
    """Instead of `per`: how many consecutive elements share one scale."""
    code: Code | None = field(default=None, kw_only=True)
    """`entropy`: frequent codes take fewer bits, so a payload may be shorter than `nbytes`."""

    @property
    def _grid(self) -> Grid:
        return Float8Grid(8, stochastic=False)


class Float8Grid(PointGrid):
    """The values of e4m3."""

    def measure(self, values: Tensor) -> Tensor:
        """max|x|/448 of each block, as bf16 rounded up: [count, 1]."""
        largest = largest_magnitude(values)
        # x - x is 0, but NaN for an infinity, which clamping would hide.
        # A tensor on the same device: for a Python number CUDA multiplies by the reciprocal.
        bounded = (largest / torch.full_like(largest, _LARGEST)).clamp_(max=_LARGEST_SCALE).add_(largest - largest)
        return bfloat16_above(bounded, _SMALLEST_SCALE)

    def codes(self, values: Tensor, scales: Tensor, noise: Tensor | None) -> Tensor:
        """The values over their block's scale, as e4m3."""
        units = self.units(scales)
        return (values / units.masked_fill(units == 0, torch.inf)).to(torch.float8_e4m3fn).view(torch.uint8)

    def points(self) -> Tensor:
        """Each e4m3 value, as float32 [256]."""
        return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()

    def bound(self, values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """|x|/17, or 2**-10 scales if that is more; all of |x| in a block of scale 0."""
        magnitude, units = values.abs(), self.units(scales)
        error = torch.where(units == 0, magnitude, torch.maximum(magnitude / 17, units * 2.0**-10))
        return error, magnitude + error
