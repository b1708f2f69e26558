"""q's option clip: a scale below a block's largest magnitude, so that all its other elements get finer steps.

`clip="mse"` looks for the scale with the least mean square error, in little more than one pass over the block. What a
scale s loses is about

    n * k * s**2 / (3 * 4**bits)   in steps of the grid      +      sum of (|x| - s)**2 over all |x| > s, the cut

It is least where n * k * s / (3 * 4**bits) = sum of (|x| - s) over all |x| > s. Newton's method finds that, from the
left, on the largest of each 8 magnitudes instead of all: those beyond s are few, and rarely two of one eight. If errors
were spread evenly over each step, k would be 1. In a block that looks Gaussian, k is what makes the solution the known
best scale of a Gaussian. The check is the ratio of the mean square of the maxima to the square of their mean: 1.09 for
a Gaussian, 1.2 after a ReLU or for a Laplacian, more with outliers.

At 1 bit without zero the best scale is known: decoded values are +-s/2, so s is twice the mean magnitude.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor

from thinwire.compress.codecs.fused.arithmetic import nonzero

_OVER_BLOCK = (0, 2)
POOLED = 8
"""Magnitudes of which a search looks at the largest."""
_SAMPLE = 128
"""Elements of a block that choose its grid."""
_STEPS = 3
_GAUSSIAN_BELOW = 1.16

MIDRISE: Mapping[int, float] = MappingProxyType({2: 0.385, 3: 0.509, 4: 0.637, 5: 0.751})
"""k of a Gaussian block by bits, for a grid without zero. Each follows from the best scale: 1.99, 2.34, 2.68 and 3.01
standard deviations."""

MIDTREAD: Mapping[int, float] = MappingProxyType({1: 0.724, 2: 0.277, 3: 0.409, 4: 0.574, 5: 0.721})
"""The same for a grid with zero, whose best scale is 1.22, 2.10, 2.41, 2.71 and 3.02 standard deviations."""


@dataclass(frozen=True)
class Maxima:
    """The largest of each 8 magnitudes of blocks, in units of their largest."""

    rows: Tensor
    """float32 [count, some]."""
    largest: Tensor
    """max|x| of each block, [count, 1]."""
    least: Tensor
    """The least value of each block, [count, 1]."""
    most: Tensor
    """The largest value of each block, [count, 1]."""
    size: int
    """Elements of a block."""

    @classmethod
    def of(cls, values: Tensor) -> "Maxima":
        """Those of `values` [outer, count, inner]."""
        # two passes that only read are faster than one that writes magnitudes
        lows, highs = _of_eights(values, torch.amin), _of_eights(values, torch.amax)
        maxima = torch.maximum(highs, -lows)
        largest = maxima.amax(_OVER_BLOCK, keepdim=True)
        least, most = lows.amin(_OVER_BLOCK).unsqueeze(1), highs.amax(_OVER_BLOCK).unsqueeze(1)
        # in units of the largest no sum overflows
        maxima.div_(largest.masked_fill(largest == 0, 1.0))
        # a row a block: torch is slower over two dimensions
        rows = maxima.transpose(0, 1).flatten(1)
        return cls(rows, largest.view(-1, 1), least, most, values.shape[0] * values.shape[2])

    @cached_property
    def mean(self) -> Tensor:
        """The mean of each block's maxima, [count, 1]."""
        return self.rows.mean(1, keepdim=True)

    @cached_property
    def look_gaussian(self) -> Tensor:
        """Whether each block looks Gaussian, [count, 1]."""
        square = self.rows.square().mean(1, keepdim=True)
        return square < _GAUSSIAN_BELOW * self.mean.square()

    def beyond(self, scale: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of what each block's maxima exceed its `scale` by, and how many do: [count, 1]; overwrites `room`."""
        torch.sub(self.rows, scale, out=room).clamp_(min=0)
        return room.sum(1, keepdim=True), room.sign_().sum(1, keepdim=True)


class Passes:
    """What a search for a scale reads of all elements. Kernels have passes of their own, with the same results."""

    def maxima(self, values: Tensor) -> Maxima:
        """The largest of each 8 magnitudes of `values` [outer, count, inner]."""
        return Maxima.of(values)

    def ends(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest value of each block, [count, 1]; NaN if the block has one."""
        return values.amin(_OVER_BLOCK).unsqueeze(1), values.amax(_OVER_BLOCK).unsqueeze(1)

    def missed(self, values: Tensor, steps: Tensor, shifts: Tensor, half: int) -> Tensor:
        """What some grids lose of a sample of `values`: [grids, outer, count, some].

        Points of a grid are `steps` [grids, count, 1] apart, from -half + 1 to half of them, `shifts` lower.
        """
        outer, _, inner = values.shape
        along_inner = min(inner, _SAMPLE)
        # torch works on elements far apart one by one, so they are brought together once
        sample = values[:: max(1, outer * along_inner // _SAMPLE), :, :: sample_step(inner)].contiguous()
        units, shifts = steps.unsqueeze(1), shifts.unsqueeze(1)
        levels = (sample / -nonzero(units)).sub_(shifts).round_().clamp_(-half, half - 1).neg_()
        return levels.mul_(units).sub_(units * shifts).sub_(sample)


def sample_step(inner: int) -> int:
    """How far apart the elements of a sample are, in blocks of `inner` consecutive elements."""
    return max(1, inner // _SAMPLE)


def least_square_scale(maxima: Maxima, bits: int, gaussian: Mapping[int, float]) -> Tensor:
    """The scale of each block that loses least: float32 [count, 1].

    At most the largest magnitude; NaN if a block has NaN or infinity. `gaussian` has k of a Gaussian block.
    """
    number = maxima.rows.shape[1]
    factor = torch.ones_like(maxima.mean).masked_fill_(maxima.look_gaussian, gaussian.get(bits, 1.0))
    slope = factor * (maxima.size / (3 * 4.0**bits))
    scale = maxima.mean * (number / (number + slope))  # the first step, from 0
    room = torch.empty_like(maxima.rows)
    for _ in range(_STEPS):
        total, count = maxima.beyond(scale, room)
        scale = scale + (total - slope * scale) / (count + slope)
    return scale.clamp_(max=1) * maxima.largest


def mean_magnitude(values: Tensor) -> Tensor:
    """The mean of |x| of each block of `values` [outer, count, inner]: float32 [count, 1]."""
    # the largest first taken as the unit, so that no sum overflows
    magnitudes = values.abs()
    largest = magnitudes.amax(_OVER_BLOCK, keepdim=True)
    mean: Tensor = magnitudes.div_(largest.masked_fill(largest == 0, 1.0)).mean(_OVER_BLOCK, keepdim=True)
    return (mean * largest).view(-1, 1)


def _of_eights(values: Tensor, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """One number for each 8 elements of a block, those far apart, and the few left over: [.., count, ..]."""
    dim = 0 if values.shape[0] > values.shape[2] else 2
    size = values.shape[dim] // POOLED
    if not size:
        return values
    eights, rest = values.tensor_split([POOLED * size], dim)
    reduced = reduce(eights.unflatten(dim, (POOLED, size)), dim)
    return torch.cat([reduced, rest], dim) if rest.shape[dim] else reduced
