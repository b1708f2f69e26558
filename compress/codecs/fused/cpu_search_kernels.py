"""Kernels of searches for a scale on a CPU, compiled by Numba: what clip.py's Passes read, in one pass each."""

import numpy as np

from thinwire.compress.codecs.clip import GAUSSIAN_BELOW, LOSS_UNITS, MOST_LOST, PARTS, POOLED, STEPS
from thinwire.compress.codecs.fused.cpu_kernels import _BUFFER, _INFINITY, _TIES_TO_EVEN, _compiled

_NO_SIGN = np.int32(0x7FFFFFFF)
_LEAST, _MOST = np.int32(-0x80000000), np.int32(0x7FFFFFFF)


@_compiled
def least_square_scales(values, slopes, least, most, scales):
    """Write the ends of each block of `values` [count, inner], and its best scale for each pair of `slopes`.

    `scales` is float32 [grids, count]. Maxima and scales are integers here, of 1/PARTS of the largest magnitude.
    """
    count, inner = values.shape
    integers, number, grids = values.view(np.int32), inner // POOLED + inner % POOLED, len(slopes)
    # a step of many blocks at a time: each waits for the last of its own block
    some = max(1, _BUFFER // number)
    rows, chosen, found = np.empty((some, number), np.int32), np.empty((grids, some)), np.empty((grids, some))
    maxima = np.empty(number, np.float32)
    for first in range(0, count, some):
        blocks = min(some, count - first)
        for i in range(blocks):
            block = first + i
            least[block], most[block] = _floats(*_ends(integers[block]))
            _pool(integers, block, maxima.view(np.int32))
            total, looks_gaussian = _count(maxima, max(-least[block], most[block]), rows[i])
            for grid in range(grids):
                chosen[grid, i] = slopes[grid, 0] if looks_gaussian else slopes[grid, 1]
            found[0, i] = total / (number + chosen[0, i])
        for _ in range(STEPS):
            _step(rows[:blocks], chosen[0], found[0], found[0])
        for grid in range(1, grids):
            _step(rows[:blocks], chosen[grid], found[grid - 1], found[grid])
        for i in range(blocks):
            largest = max(-least[first + i], most[first + i])
            for grid in range(grids):
                share = np.float32(min(found[grid, i] / PARTS, 1.0))
                scales[grid, first + i] = share * largest if largest < np.inf else np.float32(np.nan)


@_compiled
def _pool(integers, block, maxima):
    """Write the bits of the largest of each 8 magnitudes, which are an eighth of a block apart, and of what is left."""
    # a row of its own for the block would cost short blocks half as much again
    inner = integers.shape[1]
    size = inner // POOLED
    for i in range(size):
        maxima[i] = integers[block, i] & _NO_SIGN
    for part in range(1, POOLED):
        start = part * size
        for i in range(size):
            maxima[i] = max(maxima[i], np.int32(integers[block, start + i] & _NO_SIGN))
    for i in range(POOLED * size, inner):
        maxima[i - (POOLED - 1) * size] = integers[block, i] & _NO_SIGN


@_compiled
def _count(maxima, largest, row):
    """Write maxima as integers of 1/PARTS of the largest; return their sum, and whether they look Gaussian."""
    if not largest < np.inf:
        maxima[:] = 0
    unit = np.float32(1) if largest == 0 else largest
    total = squares = np.int64(0)
    for i in range(len(row)):
        x = (maxima[i] / unit + np.float32(1)) - np.float32(1)
        square = (x * x + np.float32(1)) - np.float32(1)
        whole = np.int32(x * np.float32(PARTS))
        row[i] = whole
        total += whole
        squares += np.int32(square * np.float32(PARTS))
    mean = total / PARTS
    return total, squares / PARTS * len(row) < GAUSSIAN_BELOW * (mean * mean)


@_compiled
def _step(rows, slopes, before, after):
    """A step of Newton's method for each of `rows`."""
    for block in range(len(rows)):
        scale, slope, row = np.rint(before[block]), slopes[block], rows[block]
        whole, excess, more = np.int32(scale), np.int64(0), np.int32(0)
        for i in range(len(row)):
            above = max(np.int32(row[i] - whole), np.int32(0))
            excess += above
            more = np.int32(more + np.int32(above > 0))
        after[block] = scale + (excess - slope * scale) / (more + slope)


@_compiled
def ends(values, least, most):
    """The least and the largest of `values` [count, inner] of each block; NaN for both if there is one."""
    integers = values.view(np.int32)
    for block in range(len(values)):
        low, high = _ends(integers[block])
        least[block], most[block] = _floats(low, high)


@_compiled
def _ends(integers):
    """The least and the largest as integers in the order of floats."""
    low, high = _MOST, _LEAST
    for i in range(len(integers)):
        ordered = _ordered(integers[i])
        low, high = min(low, ordered), max(high, ordered)
    return low, high


@_compiled
def losses(sample, factors, shifts, half, out):
    """Write the squares of what grids lose of `sample` [count, some], in units that clip.py names.

    `out` is int32 [grids, count]: sums of integers have no order.
    """
    low, high, most, units = -half, half - np.float32(1), np.float32(MOST_LOST), np.float32(LOSS_UNITS)
    for grid in range(len(out)):
        for block in range(len(sample)):
            row, factor, shift, total = sample[block], factors[grid, block], shifts[grid, block], np.int32(0)
            for i in range(len(row)):
                down = row[i] * factor - shift
                level = low if down < low else down
                level = high if level > high else level
                lost = down - ((level + _TIES_TO_EVEN) - _TIES_TO_EVEN)
                square = lost * lost
                square = square if square < most else most
                total = np.int32(total + np.int32(square * units))
            out[grid, block] = total


@_compiled
def _ordered(integer):
    """A float's bits as an integer in the order of floats; NaN is at both ends."""
    return np.int32(integer ^ np.int32(np.int32(integer >> np.int32(31)) & _NO_SIGN))


@_compiled
def _floats(low, high):
    """The floats of the least and the largest ordered integer; NaN for both if one is."""
    if high > _INFINITY or low < -_INFINITY - 1:
        return np.float32(np.nan), np.float32(np.nan)
    return np.int32(_ordered(low)).view(np.float32), np.int32(_ordered(high)).view(np.float32)
