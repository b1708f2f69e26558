"""For each block the grid that loses less: one with a point at zero, or q's without.

    thinwire simulate quickstart --codec 'auto_grid.Auto(4)/q(8)'     in this folder

It helps where some rows are mostly zeros and others are not, at 2 to 4 bits: of rows after a ReLU it has the 5 dB more
of the first grid, of uniform ones those of the second. No training has shown a gain over `q(4)`, whose grid has a zero.

payload     | scale of block 0, bf16 | .. | scale of block C-1 | codes of all elements, packed as those of q |

value       (2**(b-1) - code) * s / 2**(b-1)               s with the sign of the block's largest magnitude
            the same, less s / 2**b                        where the lowest bit of the scale, no part of s, is 1
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compress.codec import require_int
from thinwire.compress.codecs.blockwise import Blockwise
from thinwire.compress.codecs.coding.lengths import Code
from thinwire.compress.codecs.fused.arithmetic import CodeRule, Coding, nonzero
from thinwire.compress.codecs.granularity import Per
from thinwire.compress.codecs.grid import Grid, MidTreadGrid
from thinwire.errors import attempt

_INFINITY = 0x7F80
_SAMPLE = 128
"""Elements of a block that choose its grid."""
_UNITS, _MOST = 2.0**12, 2.0**11
"""In squares of a grid's steps: the parts that a loss is counted in, and the most. 255 of these fit in 32 bits."""


@dataclass(frozen=True, repr=False)
class Auto(Blockwise):
    """`auto_grid.Auto(bits)`: as `q(bits)`, with the grid that loses less on 128 elements of each block.

    The largest error is that of the grid, with an s that may be 1.6 % larger.
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
        return AutoGrid(self.bits, stochastic=False)


@dataclass(frozen=True)
class AutoGrid(MidTreadGrid):
    """Mid-tread or mid-rise, in each block the one that loses less on a sample of it.

    The scale is rounded up to a bf16 whose lowest bit is 0. That bit is set where the block is mid-rise: then s is
    positive, and code k is (2**(b-1) - k) * s/2**(b-1) - s/2**b.
    """

    measuring = None  # kernels know one grid at a time
    risen: ClassVar[int] = 1
    """The bit of a scale that says mid-rise."""

    def measure(self, values: Tensor) -> Tensor:
        """The scale of each block on the better grid, as bf16: [count, 1]."""
        signed = super().measure(values)
        scale = _even(signed.abs())
        tread = torch.copysign(scale, signed)
        rise = scale.view(torch.int16).bitwise_or(self.risen).view(torch.bfloat16)
        scales = torch.stack([rise, tread])
        of_rise, of_tread = _losses(values, self._steps(scales), self._shifts(scales), self.half)
        # torch chooses one by one, and guesses wrong half the time
        bits_of_rise, bits_of_tread = scales.view(torch.int16)
        chosen: Tensor = bits_of_tread ^ (bits_of_rise ^ bits_of_tread) * (of_rise < of_tread)
        return chosen.view(torch.bfloat16)

    def coding(self, scales: Tensor) -> Coding:
        """The nearest point, half a step lower where the block is mid-rise."""
        return Coding(CodeRule.NEAREST, -nonzero(self._steps(scales)), self._shifts(scales))

    def factors(self, scales: Tensor) -> tuple[Tensor, Tensor]:
        """The steps, s / 2**(bits-1), and half of one where the block is mid-rise; both are exact."""
        step = self._steps(scales)
        return step, step * self._shifts(scales)

    def bound(self, values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Half a step of the grid, more for what is cut off, and the scale."""
        plain = self._plain(scales)
        _, largest = super().bound(values, plain)
        step, shift = largest / self.half, self._shifts(scales)
        oriented = torch.where(plain < 0, -values, values)
        cut = torch.maximum(oriented - largest + step * shift, step * (1 - shift) - largest - oriented)
        return self._error(cut, step, largest), largest

    def _steps(self, scales: Tensor) -> Tensor:
        return super()._steps(self._plain(scales))

    def _plain(self, scales: Tensor) -> Tensor:
        """Scales without the bit that says which grid."""
        return scales.view(torch.int16).bitwise_and(~self.risen).view(torch.bfloat16)

    def _shifts(self, scales: Tensor) -> Tensor:
        """Half a step where the block is mid-rise, else 0."""
        return scales.view(torch.int16).bitwise_and(self.risen).float() * 0.5


def _losses(values: Tensor, steps: Tensor, shifts: Tensor, half: int) -> Tensor:
    """What some grids lose of a sample of each block of `values`: sums of squares, float64 [grids, count, 1].

    Points of a grid are `steps` [grids, count, 1] apart, from -half + 1 to half of them, `shifts` lower. A square is
    counted in whole units, and cut to the most, so that these sums are exact, too.
    """
    outer, _, inner = values.shape
    # torch works on elements far apart one by one, so they are brought together once
    sample = values[:: max(1, outer * min(inner, _SAMPLE) // _SAMPLE), :, :: max(1, inner // _SAMPLE)]
    down = (sample.transpose(0, 1).flatten(1) * (-1 / nonzero(steps))).sub_(shifts)
    lost = down.sub_(down.round().clamp_(-half, half - 1))
    units = lost.square_().clamp_(max=_MOST).mul_(_UNITS).floor_()
    return units.sum(2, keepdim=True, dtype=torch.float64).mul_(steps.double().square_())


def _even(scales: Tensor) -> Tensor:
    """bf16 `scales`, not negative, rounded up to those whose lowest bit is 0; infinity for NaN too."""
    return scales.view(torch.int16).add(1).bitwise_and_(-2).clamp_(max=_INFINITY).view(torch.bfloat16)
