"""The codec fp8: each element in 8 bits with an exponent of its own, beside one scale for each block."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compress.codec import Key
from thinwire.compress.codecs.scaled import Scaled, bfloat16_above

_LARGEST = 448
_SMALLEST_SCALE = 2.0**-117
_LARGEST_SCALE = 145 * 2.0**112


@dataclass(frozen=True, repr=False)
class Float8(Scaled):
    """``fp8``: e4m3 (1 bit of sign, 4 of exponent, 3 of mantissa; 448 the largest), ties to even.

    The scale is max|x|/448 of the block as bf16, rounded up, so that the largest value is sent as 448 or a little less
    and no value lies outside. The decoded product, of 4 bits and 8, is one that float32 holds exactly. The largest
    error, f being the scale, is

        |x|/17      for |x| >= 2**-6 * f, that is, down to about 1/28700 of the block's largest
        f/2**10     below

    plus the rounding of the tensor's dtype. A block whose f would be below 2**-117 (max|x| < 2.7e-33) is decoded as
    zeros, to stay clear of denormal numbers. Values beyond 3.37e38 are cut to that, by at most 1 %, to stay finite.
    With NaN or infinity in a block, nothing decoded from it is finite.
    """

    name: ClassVar[str] = "fp8"

    @property
    def _code_bits(self) -> int:
        return 8

    def _scales(self, largest: Tensor) -> Tensor:
        # x - x is 0, except that it is NaN where clamping would have hidden an infinity.
        bounded = (largest / _LARGEST).clamp_(max=_LARGEST_SCALE).add_(largest - largest)
        scales = bfloat16_above(bounded)
        return scales.masked_fill_(scales < _SMALLEST_SCALE, 0.0)

    def _codes(self, values: Tensor, units: Tensor, key: Key) -> Tensor:
        return (values / units.masked_fill(units == 0, torch.inf)).to(torch.float8_e4m3fn).view(torch.uint8)

    def _table(self) -> Tensor:
        return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()

    def _bound(self, magnitude: Tensor, units: Tensor) -> Tensor:
        bound = torch.maximum(magnitude / 17, units * 2.0**-10)
        return torch.where(units == 0, magnitude, bound)
