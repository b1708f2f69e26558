"""Kernels of searches for a scale on a CPU, compiled by Numba: what clip.py's Passes read, in one pass each."""

import numpy as np

from thinwire.compress.codecs.fused.cpu_kernels import _INFINITY, _TIES_TO_EVEN, _compiled

_POOLED = 8
_NO_SIGN = np.int32(0x7FFFFFFF)
_LEAST, _MOST = np.int32(-0x80000000), np.int32(0x7FFFFFFF)


@_compiled
def maxima(values, rows, largest, least, most):
    """The largest of each 8 magnitudes of `values` [count, inner], over the block's largest; and the block's ends.

    `rows` are zeros [count, inner // 8 + inner % 8]: the eighths of a block one above the other, and what is left.
    """
    count, inner = values.shape
    integers, found, size = values.view(np.int32), rows.view(np.int32), inner // _POOLED
    for block in range(count):
        low, high = _MOST, _LEAST
        for part in range(_POOLED):
            some, row = integers[block, part * size : (part + 1) * size], found[block]
            for i in range(len(some)):
                row[i] = max(row[i], np.int32(some[i] & _NO_SIGN))
                ordered = _ordered(some[i])
                low, high = min(low, ordered), max(high, ordered)
        rest, row = integers[block, _POOLED * size :], found[block, size:]
        for i in range(len(rest)):
            row[i] = np.int32(rest[i] & _NO_SIGN)
            ordered = _ordered(rest[i])
            low, high = min(low, ordered), max(high, ordered)
        least[block], most[block] = _floats(low, high)
        largest[block] = max(-least[block], most[block])
        unit = np.float32(1) if largest[block] == 0 else largest[block]
        for i in range(rows.shape[1]):
            rows[block, i] /= unit


@_compiled
def beyond(rows, scales, out, counts):
    """Write what `rows` [count, some] exceed their scale by, and how many do."""
    for block in range(len(rows)):
        scale, count = scales[block], np.int32(0)
        for i in range(rows.shape[1]):
            more = rows[block, i] - scale
            out[block, i] = np.float32(0) if more < 0 else more
            count += np.int32(more > 0)
        counts[block] = count


@_compiled
def ends(values, least, most):
    """The least and the largest of `values` [count, inner] of each block; NaN for both if there is one."""
    integers = values.view(np.int32)
    for block in range(len(values)):
        low, high = _MOST, _LEAST
        for i in range(values.shape[1]):
            ordered = _ordered(integers[block, i])
            low, high = min(low, ordered), max(high, ordered)
        least[block], most[block] = _floats(low, high)


@_compiled
def missed(values, step, divisors, shifts, steps, half, out):
    """Write what grids lose of every `step`-th of `values` [count, inner]; `out` is [grids, count, some]."""
    taken = np.empty(out.shape[2], np.float32)
    for block in range(len(values)):
        sample = values[block, ::step]
        for i in range(len(taken)):
            taken[i] = sample[i]
        for grid in range(len(out)):
            divisor, shift, width = divisors[grid, block], shifts[grid, block], steps[grid, block]
            lower, place = width * shift, out[grid, block]
            for i in range(len(place)):
                down = taken[i] / divisor - shift
                down = -half if down < -half else down
                down = half - np.float32(1) if down > half - np.float32(1) else down
                place[i] = -((down + _TIES_TO_EVEN) - _TIES_TO_EVEN) * width - lower - taken[i]


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
