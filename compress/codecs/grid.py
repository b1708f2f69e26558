"""Grids: the values of a block's codes, given the block's scale. The grid of fp8 is in its own file.

Values come as float32 [outer, count, inner], `count` blocks (see granularity.py). An encoder may round as it likes.
A decoder does one multiplication, and for minmax one addition after it, never fused, so every machine gets the same
bits. If a block has NaN or infinity, its scale is not finite, and no decoded element of it is.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from math import frexp, sqrt
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compress.codec import Words, tensor_bytes
from thinwire.compress.codecs.cast import rounding_bound
from thinwire.compress.codecs.fused.arithmetic import CodeRule, Coding, nonzero

_OVER_BLOCK = (0, 2)
_WHOLE_BYTE = 128
_NAN = 0x7FC00000
_SMALLEST_OF_CODES = 2.0**-118
SMALLEST_SCALE = 2.0**-125
"""Scales of steps below it are 0: no product of a scale and an integer may be a denormal number."""


@dataclass(frozen=True)
class Grid(ABC):
    """2**bits values in each block, in units of its scale."""

    bits: int
    """Bits of a code, 1 to 8."""
    stochastic: bool
    """Whether values are rounded up or down by chance."""

    scale_bytes: ClassVar[int] = 2
    """The size of one block's scale in a payload."""
    scale_dtype: ClassVar[torch.dtype] = torch.bfloat16
    """The type of a scale's numbers, of which there are one or more."""
    measuring: ClassVar[CodeRule | None] = None
    """What `measure`, `coding` and `factors` do together, for kernels; None where they know nothing like it."""

    def scales_size(self, count: int) -> int:
        """Bytes of the scales of `count` blocks."""
        return count * self.scale_bytes

    def pack_scales(self, scales: Tensor) -> Tensor:
        """The bytes of `scales`, as `measure` returns them."""
        return tensor_bytes(scales)

    def unpack_scales(self, packed: Tensor, count: int) -> Tensor:
        """The scales of `count` blocks in bytes that `pack_scales` wrote."""
        # Copied, because a payload's bytes may not be aligned for their type.
        return packed.clone().view(self.scale_dtype).view(count, -1)

    @property
    def last(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @abstractmethod
    def measure(self, values: Tensor) -> Tensor:
        """The scales of `values` as sent: scale_dtype [count, numbers a scale]."""

    def noise(self, values: Tensor, words: Words) -> Tensor:
        """What `codes` adds before rounding by chance, in the shape of `values`, from the next `words`.

        Uniform in (-1/2, 1/2), of 16 bits. Each 64-bit word gives four numbers: on a CPU, torch makes random
        floats one by one, six times slower.
        """
        drawn = words((values.numel() + 3) // 4).view(torch.int16)[: values.numel()]
        return drawn.view(values.shape).float().add_(0.5).mul_(2.0**-16)

    def codes(self, values: Tensor, scales: Tensor, noise: Tensor | None) -> Tensor:
        """The codes of `values`, as uint8 [outer, count, inner]; `noise` is added in units of the grid."""
        coding, half = self.coding(scales), (self.last + 1) // 2
        if coding.rule is CodeRule.RANGE:
            assert coding.shifts is not None, "a range begins somewhere"
            steps = (values - coding.shifts).div_(coding.divisors).mul_(self.last)
            if noise is not None:
                steps.add_(noise).clamp_(0, self.last)
            return signed_codes(steps.round_().sub_(half), half)
        steps = values / coding.divisors
        if coding.shifts is not None:
            steps -= coding.shifts
        if noise is not None:
            steps += noise
        steps = steps.floor_() if coding.rule is CodeRule.FLOOR else steps.round_()
        return signed_codes(steps.clamp_(-half, half - 1), half)

    @abstractmethod
    def evaluate(self, codes: Tensor) -> None:
        """Turn `codes`, given as float32 of any shape, into their levels before scaling, in place."""

    def scale_levels(self, levels: Tensor, scales: Tensor) -> None:
        """Turn `levels` [outer, count, inner] into values, given the blocks' scales, in place."""
        factors, shifts = self.factors(scales)
        levels.mul_(factors)
        if shifts is not None:
            levels.sub_(shifts)

    def coding(self, scales: Tensor) -> Coding:
        """How values become codes without noise."""
        raise NotImplementedError("where that is no rule of arithmetic.py, a grid has `codes` of its own")

    @abstractmethod
    def factors(self, scales: Tensor) -> tuple[Tensor, Tensor | None]:
        """What levels are multiplied by in blocks of these scales, and what is subtracted then: float32 [count, 1]."""

    @abstractmethod
    def bound(self, values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """The largest error of `values`, with float32 arithmetic, and the largest decoded magnitude.

        Both are float32 and broadcast to [outer, count, inner].
        """


@dataclass(frozen=True)
class AbsMaxGrid(Grid):
    """Mid-rise: [-s, s] cut into 2**b intervals; code k stands for the middle of the k-th.

    The scale is s = max|x| of the block as bf16, rounded up, so that no value lies outside. Decoded, code k is
    (2k + 1 - 2**b) * s/2**b, which float32 holds exactly. A block whose s would be below 2**-118 (3.0e-36) is sent
    with s = 0 and decoded as zeros, to avoid denormal numbers.

    Stochastic rounding keeps the expectation only between two points of the grid, so s is first multiplied by
    2**b/(2**b-1), which puts the outermost points at +-max|x|.

    No point is zero. On Gaussian rows that is as good as a grid with zero, on rows after ReLU or with outliers it is 5
    to 18 dB worse (docs/reference/codecs.md has the figures).
    """

    measuring: ClassVar[CodeRule | None] = CodeRule.FLOOR

    def measure(self, values: Tensor) -> Tensor:
        """max|x| of each block, more for stochastic rounding, as bf16 rounded up: [count, 1]."""
        largest = largest_magnitude(values)
        if self.stochastic:
            largest *= (self.last + 1) / self.last
        return bfloat16_above(largest, _SMALLEST_OF_CODES)

    def coding(self, scales: Tensor) -> Coding:
        """The interval that a value lies in, of slightly more than s/half, so that x = s is in the last one."""
        return Coding(CodeRule.FLOOR, nonzero(scales.float() * ((1 + 2**-22) * 2.0 ** (1 - self.bits))))

    def evaluate(self, codes: Tensor) -> None:
        """The middle of an interval."""
        codes.sub_(self.last / 2)

    def factors(self, scales: Tensor) -> tuple[Tensor, None]:
        """The intervals, s * 2**(1 - bits)."""
        return scales.float() * 2.0 ** (1 - self.bits), None

    def bound(self, values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Half a step of the grid, or a whole one for stochastic rounding, and the scale."""
        largest = scales.float()
        step = largest * 2.0 ** (1 - self.bits)
        error = (step if self.stochastic else step / 2) + float32_slack(largest)
        return error.clamp(min=_SMALLEST_OF_CODES), largest


@dataclass(frozen=True)
class MidTreadGrid(Grid):
    """Zero, 2**(b-1) points on the side of the block's largest magnitude, and one less on the other.

    It is for tensors with many zeros or small values. The scale is that magnitude as bf16, rounded up, with its sign.
    Decoded, code k is (2**(b-1) - k) * s/2**(b-1), which float32 holds exactly. On the other side values beyond the
    last point, which may be a whole step short of -s, become that point.
    """

    measuring: ClassVar[CodeRule | None] = CodeRule.NEAREST

    @property
    def half(self) -> int:
        """The code of zero."""
        return (self.last + 1) // 2

    def measure(self, values: Tensor) -> Tensor:
        """The signed scale of each block, as bf16: [count, 1]."""
        least, most = values.amin(_OVER_BLOCK).unsqueeze(1), values.amax(_OVER_BLOCK).unsqueeze(1)
        magnitudes = bfloat16_above(torch.maximum(most, -least), _SMALLEST_OF_CODES)
        # by a comparison: processors and vector instructions differ in the sign of a sum that is zero or NaN
        return torch.where(most + least < 0, -magnitudes, magnitudes)

    def coding(self, scales: Tensor) -> Coding:
        """The nearest point, counted from the scale down."""
        return Coding(CodeRule.NEAREST, -nonzero(self._steps(scales)))

    def evaluate(self, codes: Tensor) -> None:
        """Steps from the point of zero."""
        codes.neg_().add_(self.half)

    def factors(self, scales: Tensor) -> tuple[Tensor, Tensor | None]:
        """The steps, s / 2**(bits-1)."""
        return self._steps(scales), None

    def bound(self, values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Half a step of the grid, more for what is cut off, and the scale."""
        scales = scales.float()
        largest, step = scales.abs(), scales.abs() / self.half
        oriented = torch.where(scales < 0, -values, values)
        cut = torch.maximum(oriented - largest, step - largest - oriented)
        return self._error(cut, step, largest), largest

    def _error(self, cut: Tensor, step: Tensor, largest: Tensor) -> Tensor:
        """The largest error of values that are `cut` beyond the outermost point."""
        return (torch.maximum(cut, step / 2) + float32_slack(largest)).clamp(min=_SMALLEST_OF_CODES)

    def _steps(self, scales: Tensor) -> Tensor:
        return scales.float() * 2.0 ** (1 - self.bits)


class MinMaxGrid(Grid):
    """2**b points from min to max of the block, both ends included.

    Encoding: code = round(z * (2**b-1)) with z = (x-min)/(max-min), ties to even. Decoding: code/(2**b-1) * (max-min) +
    min. The scale is min and max-min, as float32. A block of equal values is decoded exactly. A block
    whose max-min is beyond float32 is not finite.
    """

    scale_bytes = 8
    scale_dtype = torch.float32
    measuring: ClassVar[CodeRule | None] = CodeRule.RANGE

    def measure(self, values: Tensor) -> Tensor:
        """The least value and the range of each block, float32 [count, 2]."""
        # of zeros with both signs, torch gives either; adding zero takes the sign away
        lowest, highest = values.amin(_OVER_BLOCK) + 0.0, values.amax(_OVER_BLOCK) + 0.0
        return torch.stack([lowest, highest - lowest], 1)

    def coding(self, scales: Tensor) -> Coding:
        """The nearest point of a range."""
        lowest, extent = scales[:, :1].float(), scales[:, 1:].float()
        return Coding(CodeRule.RANGE, nonzero(extent, 1.0), lowest)

    def evaluate(self, codes: Tensor) -> None:
        """The share of the range; by a tensor: for a Python number CUDA multiplies by the reciprocal."""
        codes.div_(torch.full((1,), self.last, dtype=torch.float32, device=codes.device))

    def factors(self, scales: Tensor) -> tuple[Tensor, Tensor]:
        """The range, and the least value to be added."""
        return scales[:, 1:].float(), -scales[:, :1].float()

    def bound(self, values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Half a step of the grid, or a whole one for stochastic rounding, and the largest magnitude."""
        lowest, extent = scales[:, :1].float(), scales[:, 1:].float()
        largest = torch.maximum(lowest.abs(), (lowest + extent).abs())
        step = extent / self.last
        addition = rounding_bound(largest, torch.float32)
        return (step if self.stochastic else step / 2) + float32_slack(extent) + addition, largest


class PointGrid(Grid):
    """A grid of uneven steps: a code's point is looked up, then multiplied by its block's unit."""

    @abstractmethod
    def points(self) -> Tensor:
        """The value of each code before scaling: float32 [2**bits]."""

    def units(self, scales: Tensor) -> Tensor:
        """The factor of the points in blocks of these scales, float32; both are [count, 1]."""
        return scales.float()

    def evaluate(self, codes: Tensor) -> None:
        """Look up each code's point."""
        indices = codes.view(-1).int()
        torch.index_select(points_of(self, codes.device), 0, indices, out=codes.view(-1))

    def factors(self, scales: Tensor) -> tuple[Tensor, None]:
        """Each block's unit."""
        return self.units(scales), None


@cache
def points_of(grid: PointGrid, device: torch.device) -> Tensor:
    """The points of a grid on a device; a run has few grids."""
    return grid.points().to(device)


def signed_codes(steps: Tensor, half: int) -> Tensor:
    """The codes, uint8 from 0, of integers from -half to half - 1 in float32. `half` is a power of two.

    torch makes int8 of float32 five times as fast as uint8.
    """
    codes = steps.to(torch.int8).view(torch.uint8)
    # Masked: NaN becomes any integer, and must not change the codes of another block.
    if half < _WHOLE_BYTE:
        codes.bitwise_and_(2 * half - 1)
    return codes.bitwise_xor_(half)  # adds half; torch adds bytes half as fast


def largest_magnitude(values: Tensor) -> Tensor:
    """max|x| of each block, [count, 1]; NaN if the block has one."""
    return torch.maximum(values.amax(_OVER_BLOCK), values.amin(_OVER_BLOCK).neg_()).unsqueeze(1)


def bfloat16_above(x: Tensor, smallest: float) -> Tensor:
    """`x`, float32 and not negative, rounded up to bf16; 0 if that is below `smallest`, a power of two."""
    # as integers, which torch handles several times as fast; NaN stays one, and may have had a sign
    bits = x.abs().view(torch.int32).clamp_(max=_NAN).add_(0xFFFF).bitwise_right_shift_(16).to(torch.int16)
    return bits.masked_fill_(bits < (127 + frexp(smallest)[1] - 1) << 7, 0).view(torch.bfloat16)


def scales_of_steps(values: Tensor, step: float, last: int) -> Tensor:
    """The scale of each block of `values` [outer, count, inner], bf16 [count, 1]: `step` root mean squares of it.

    It is more where the block's largest value would need an integer beyond `last`.
    """
    # float64: the order of its sums, which machines differ in, does not reach the bf16 of a scale
    norms: Tensor = torch.linalg.vector_norm(values, dim=_OVER_BLOCK, dtype=torch.float64)
    wide = (norms / sqrt(values.shape[0] * values.shape[2])).float().unsqueeze(1) * step
    reaching = largest_magnitude(values) / torch.full((1,), last, dtype=torch.float32, device=values.device)
    wide = wide.clamp(max=torch.finfo(torch.bfloat16).max)
    return bfloat16_above(torch.maximum(reaching, wide), SMALLEST_SCALE)


def float32_slack(magnitude: Tensor) -> Tensor:
    """A bound on the error of a few float32 operations on numbers up to `magnitude`."""
    return 8 * rounding_bound(magnitude, torch.float32)
