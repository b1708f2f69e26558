"""Kernels of rotation.py on a CPU, compiled by Numba: a piece of a row stays in the nearest cache for all its rounds.

What Numba compiled is kept until this file changes: after a change of cpu_kernels.py alone, touch this one too.
"""

import numpy as np

from thinwire.compress.codecs.fused.cpu_kernels import _INFINITY, _compiled, _largest

_HUGE = (127 + 96) << 23
"""The bits of 2**96."""
_SHRUNK = np.float32(2.0**-32)
_NEAR = 8


@_compiled
def turn(rows, factors, out):
    """Write the rotated `rows` [R, m] into `out`; m is a power of two."""
    for row in range(len(rows)):
        given, place = rows[row], np.empty(len(factors), np.float32)
        for i in range(len(factors)):
            place[i] = given[i] * factors[i]
        _sums_and_differences(place)
        _copy(place, out[row])


@_compiled
def turn_back(rows, factors):
    """Undo `turn` on `rows` [R, m], in place."""
    for row in range(len(rows)):
        given, place = rows[row], np.empty(len(factors), np.float32)
        _copy(given, place)
        shrinks = _HUGE <= _largest(place.view(np.int32)) <= _INFINITY
        if shrinks:
            for i in range(len(place)):
                place[i] *= _SHRUNK
        _sums_and_differences(place)
        for i in range(len(place)):
            place[i] *= factors[i]
        if shrinks:
            for i in range(len(place)):
                place[i] /= _SHRUNK
        _copy(place, given)


@_compiled
def _copy(values, out):
    for i in range(len(out)):
        out[i] = values[i]


@_compiled
def _sums_and_differences(x):
    """H x in place, float32 [m]: rounds of distance 1, 2, 4, .."""
    distance = 1
    if len(x) >= _NEAR:
        _three_rounds(x.reshape(-1, _NEAR))
        distance = _NEAR
    while distance < len(x):
        _one_round(x.reshape(-1, 2, distance))
        distance *= 2


@_compiled
def _one_round(pairs):
    # a function of its own, else LLVM does not vectorize it
    for pair in range(len(pairs)):
        for i in range(pairs.shape[2]):
            upper, lower = pairs[pair, 0, i], pairs[pair, 1, i]
            pairs[pair, 0, i] = upper + lower
            pairs[pair, 1, i] = upper - lower


@_compiled
def _three_rounds(x):
    """Those of distance 1, 2 and 4, in rows of 8."""
    for i in range(len(x)):
        a, b, c, d, e, f, g, h = x[i, 0], x[i, 1], x[i, 2], x[i, 3], x[i, 4], x[i, 5], x[i, 6], x[i, 7]
        a, b, c, d, e, f, g, h = a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h
        a, b, c, d, e, f, g, h = a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h
        x[i, 0], x[i, 1], x[i, 2], x[i, 3] = a + e, b + f, c + g, d + h
        x[i, 4], x[i, 5], x[i, 6], x[i, 7] = a - e, b - f, c - g, d - h
