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

_OVER_BLOCK = (0, 2)
_POOLED = 8
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
    lows: Tensor
    """The least of each 8 values, [some, count, some]."""
    highs: Tensor
    """The largest of each 8 values, [some, count, some]."""
    size: int
    """Elements of a block."""

    @classmethod
    def of(cls, values: Tensor) -> "Maxima":
        """Those of `values` [outer, count, inner]."""
        # two passes that only read are faster than one that writes magnitudes
        lows, highs = _of_eights(values, torch.amin), _of_eights(values, torch.amax)
        maxima = torch.maximum(highs, -lows)
        largest = maxima.amax(_OVER_BLOCK, keepdim=True)
        # in units of the largest no sum overflows
        maxima.div_(largest.masked_fill(largest == 0, 1.0))
        # a row a block: torch is slower over two dimensions
        rows = maxima.transpose(0, 1).flatten(1)
        return cls(rows, largest.view(-1, 1), lows, highs, values.shape[0] * values.shape[2])

    @property
    def least(self) -> Tensor:
        """The least value of each block, [count, 1]."""
        return self.lows.amin(_OVER_BLOCK).unsqueeze(1)

    @property
    def most(self) -> Tensor:
        """The largest value of each block, [count, 1]."""
        return self.highs.amax(_OVER_BLOCK).unsqueeze(1)

    @cached_property
    def mean(self) -> Tensor:
        """The mean of each block's maxima, [count, 1]."""
        return self.rows.mean(1, keepdim=True)

    @cached_property
    def look_gaussian(self) -> Tensor:
        """Whether each block looks Gaussian, [count, 1]."""
        square = self.rows.square().mean(1, keepdim=True)
        return square < _GAUSSIAN_BELOW * self.mean.square()


def least_square_scale(maxima: Maxima, bits: int, gaussian: Mapping[int, float]) -> Tensor:
    """The scale of each block that loses least: float32 [count, 1].

    At most the largest magnitude; NaN if a block has NaN or infinity. `gaussian` has k of a Gaussian block.
    """
    values, number = maxima.rows, maxima.rows.shape[1]
    factor = torch.where(maxima.look_gaussian, gaussian.get(bits, 1.0), 1.0)
    slope = factor * (maxima.size / (3 * 4.0**bits))
    scale = maxima.mean * (number / (number + slope))  # the first step, from 0
    beyond = torch.empty_like(values)
    for _ in range(_STEPS):
        torch.sub(values, scale, out=beyond).clamp_(min=0)
        total = beyond.sum(1, keepdim=True)
        count = beyond.sign_().sum(1, keepdim=True)
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
    size = values.shape[dim] // _POOLED
    if not size:
        return values
    eights, rest = values.tensor_split([_POOLED * size], dim)
    reduced = reduce(eights.unflatten(dim, (_POOLED, size)), dim)
    return torch.cat([reduced, rest], dim) if rest.shape[dim] else reduced
