"""q's option clip: a scale below a block's largest magnitude, so that all its other elements get finer steps.

`clip="mse"` looks for the scale with the least mean square error, in little more than one pass over the block. What a
scale s loses is about

    n * k * s**2 / (3 * 4**bits)   in steps of the grid      +      sum of (|x| - s)**2 over all |x| > s, the cut

It is least where n * k * s / (3 * 4**bits) = sum of (|x| - s) over all |x| > s. Newton's method finds that, from the
left, on the largest of each 8 magnitudes instead of all: those beyond s are few, and rarely two of one eight. If errors
were spread evenly over each step, k would be 1. In a block that looks Gaussian, k is what makes the solution the known
best scale of a Gaussian. The check is the ratio of the mean square of the maxima to the square of their mean: 1.09 for
a Gaussian, 1.2 after a ReLU or for a Laplacian, more with outliers.

Sums are exact: maxima and scales are multiples of 2**-23 of the block's largest magnitude, and their sums are integers
to float64. So they have no order, and GPUs, kernels and eager code find the same scale.

At 1 bit without zero the best scale is known: decoded values are +-s/2, so s is twice the mean magnitude.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

_OVER_BLOCK = (0, 2)
POOLED = 8
"""Magnitudes of which a search looks at the largest."""
STEPS = 3
"""Steps of Newton's method after the first."""
PARTS = 2.0**23
"""The parts of a block's largest magnitude that a search counts in."""
GAUSSIAN_BELOW = 1.16

Gaussian = Mapping[int, float]
"""Bits of a grid -> k of a Gaussian block."""

MIDRISE: Gaussian = MappingProxyType({2: 0.385, 3: 0.509, 4: 0.637, 5: 0.751})
"""For a grid without zero. Each follows from the best scale: 1.99, 2.34, 2.68 and 3.01 standard deviations."""

MIDTREAD: Gaussian = MappingProxyType({1: 0.724, 2: 0.277, 3: 0.409, 4: 0.574, 5: 0.721})
"""For a grid with zero, whose best scale is 1.22, 2.10, 2.41, 2.71 and 3.02 standard deviations."""


Search = Callable[[Tensor, int, Gaussian], tuple[Tensor, Tensor, Tensor]]
"""As `least_square_scales`; kernels have one of their own, with the same results."""


def ends_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest value of each block, [count, 1]; NaN if the block has one."""
    return values.amin(_OVER_BLOCK).unsqueeze(1), values.amax(_OVER_BLOCK).unsqueeze(1)


def least_square_scales(values: Tensor, bits: int, grid: Gaussian) -> tuple[Tensor, Tensor, Tensor]:
    """The ends of each block of `values` [outer, count, inner], and the scale that loses least on a grid.

    All are float32 [count, 1]. A scale is at most the largest magnitude; NaN if a block has NaN or infinity.
    """
    # two passes that only read are faster than one that writes magnitudes
    lows, highs = _of_eights(values, torch.amin), _of_eights(values, torch.amax)
    maxima = torch.maximum(highs, -lows)
    largest = maxima.amax(_OVER_BLOCK, keepdim=True)
    maxima.div_(largest.masked_fill(largest == 0, 1.0))
    # a row a block: torch is slower over two dimensions
    rows, largest = maxima.transpose(0, 1).flatten(1), largest.view(-1, 1)
    _round(rows)
    scale = _solved(rows, *slopes(bits, grid, values.shape[0] * values.shape[2])).float() * largest
    return lows.amin(_OVER_BLOCK).unsqueeze(1), highs.amax(_OVER_BLOCK).unsqueeze(1), scale


def slopes(bits: int, gaussian: Gaussian, size: int) -> tuple[float, float]:
    """The n * k / (3 * 4**bits) of a block of n = `size` elements: with k of a Gaussian block, and with 1."""
    evenly = size / (3 * 4.0**bits)
    return gaussian.get(bits, 1.0) * evenly, evenly


def _solved(rows: Tensor, of_gaussian: float, evenly: float) -> Tensor:
    """The best scale of each block for these slopes, float64 [count, 1], in units of the largest magnitude.

    `rows` [count, some] are the maxima of each block, float32 multiples of 1/PARTS.
    """
    number, ones = rows.shape[1], torch.ones(rows.shape[1], 1, dtype=torch.float64, device=rows.device)
    squares = _round(rows.square()).double() @ ones  # torch adds up short rows several times as slowly
    rows = rows.double()
    total, room = rows @ ones, torch.empty_like(rows)
    looks_gaussian = squares * number < GAUSSIAN_BELOW * (total * total)
    slope = torch.full_like(total, evenly).masked_fill_(looks_gaussian, of_gaussian)
    scale = total / (number + slope)  # the first step, from 0
    for _ in range(STEPS):
        scale = scale.mul(PARTS).round_().div_(PARTS)
        excess = torch.sub(rows, scale, out=room).clamp_(min=0) @ ones
        scale = scale + (excess - slope * scale) / (room.sign_() @ ones + slope)
    return scale.clamp(max=1)


def _round(x: Tensor) -> Tensor:
    """Round `x`, float32 from 0 to 1, to multiples of 1/PARTS, in place."""
    return x.add_(1).sub_(1)


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
