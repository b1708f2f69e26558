"""q's option scale_bits=8: scales of one byte each, for blocks so short that their scales are much of a payload.

scales of a payload     | e | byte of block 0 | .. | byte of block C-1 |

A byte has 5 bits of exponent, counted down from the tensor's largest scale, and below them 3 bits of mantissa m:

    byte 0                0
    byte b of 1 to 254    (1 + m/8) * 2**(b//8 - 31 + e - 127)     m = b % 8
    byte 255              not a number

So scales may be 2**31 times smaller than the largest; those still smaller are rounded up to byte 1. Each is rounded up,
by at most an eighth, so no value lies outside its grid.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compress.codecs.grid import AbsMaxGrid

_MANTISSA = 20
"""A float32, seen as an integer and shifted right by this, is its exponent and 3 bits of mantissa."""
_EXPONENTS = 31
_LEAST = 40
"""The least e, so that the smallest scale is no denormal number."""
_LARGEST, _NAN = 254, 255


@dataclass(frozen=True)
class ByteScaledGrid(AbsMaxGrid):
    """Mid-rise, with scales of a byte."""

    scales_are_apart = False

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
