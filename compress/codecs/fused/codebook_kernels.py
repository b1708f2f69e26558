"""The codebook on a CPU, compiled by Numba: what codebook.py does with torch operations, row by row.

Imported where used.

Tables are float32 [entries, width + 2], whole numbers; a row of a message is float32 or int16 [width].
"""

import numpy as np

from thinwire.compress.codecs.fused.cpu_kernels import TIES_TO_EVEN, compiled
from thinwire.compress.entries import COUNT, EXTRA, LARGEST, LAST, MOST_ROWS, UNIT, UNLIKE

_PART = np.float32(1 / UNIT)
_INFINITY = 0x7F80
_LARGEST = np.float32(3.4028234663852886e38)
_MOST = np.float32(LARGEST)


@compiled
def unpredicted(values, scales, table, last, entries, integers):
    """Write the integers, int16 [n], of what is left of values [n]; an entry that needs too large ones becomes 0."""
    width = table.shape[1] - EXTRA
    for row in range(len(entries)):
        some, out = values[row * width : (row + 1) * width], integers[row * width : (row + 1) * width]
        if not 0 < scales[row] < _INFINITY:
            entries[row] = 0
            out[:] = 0
            continue
        unit = np.int32(np.int32(scales[row]) << np.int32(16)).view(np.float32)
        limit = min(np.float32(np.floor(_LARGEST / unit)), last)
        if not _left(some, unit, limit, table[entries[row]], out) <= last:
            entries[row] = 0
            _left(some, unit, limit, table[0], out)


@compiled
def _left(some, unit, limit, entry, out):
    """Write the integers of a row less an entry, and return the largest magnitude before they were rounded."""
    most = np.float32(0)
    for i in range(len(some)):
        left = min(max(some[i] / unit, -limit), limit) - entry[i] * _PART
        most = max(most, abs(left))
        out[i] = np.int16(np.int32((left + TIES_TO_EVEN) - TIES_TO_EVEN))
    return most


@compiled
def values(integers, scales, table, entries, out):
    """Write integers, with what entries predict, times the scales of their rows, float32 [n]."""
    width = table.shape[1] - EXTRA
    for row in range(len(entries)):
        unit = np.int32(np.int32(scales[row]) << np.int32(16)).view(np.float32)
        entry, some = table[entries[row]], integers[row * width : (row + 1) * width]
        place = out[row * width : (row + 1) * width]
        for i in range(width):
            value = (np.float32(some[i]) + entry[i] * _PART) * unit
            value = _LARGEST if value > _LARGEST else value  # NaN stays
            place[i] = -_LARGEST if value < -_LARGEST else value


@compiled
def learn(table, entries, integers):
    """entries.update: update a table by the entries, and the integers [rows, width], of a message."""
    rows, width = integers.shape
    now = table[:, LAST].max() + np.float32(1)
    unlike, place = np.zeros(rows, np.bool_), np.full(len(table), -1, np.int32)
    moving = adding = 0
    for row in range(rows):
        left, whole = _sizes(integers[row], table[entries[row]])
        unlike[row] = UNLIKE * UNIT * UNIT * left > whole
        adding += unlike[row]
        if not unlike[row] and entries[row] and place[entries[row]] < 0:
            place[entries[row]] = moving
            moving += 1
    sums, found = np.zeros((moving, width), np.int32), np.zeros(moving, np.int64)
    added, at = np.empty((adding, width), np.float32), 0  # made before any entry moves
    for row in range(rows):
        if unlike[row]:
            _arrived(integers[row], table[entries[row]], added[at])
            at += 1
        elif entries[row]:
            found[place[entries[row]]] += 1
            _add(integers[row], sums[place[entries[row]]])
    for entry in range(len(table)):
        if place[entry] >= 0:
            total = np.int64(table[entry, COUNT]) + found[place[entry]]
            _move(table[entry, :width], sums[place[entry]], np.float64(total))
            table[entry, COUNT], table[entry, LAST] = np.float32(min(total, MOST_ROWS)), now
    if not adding:
        return
    free = np.argsort(table[1:, LAST], kind="mergesort")[:adding] + 1
    for at in range(len(free)):
        if table[free[at], LAST] < now:
            table[free[at], :width] = added[at]
            table[free[at], COUNT], table[free[at], LAST] = np.float32(1), now


@compiled
def _sizes(integers, entry):
    """The sums of k^2 and of c^2."""
    left = whole = np.int64(0)
    for i in range(len(integers)):
        k = np.int64(integers[i])
        c = UNIT * k + np.int64(entry[i])
        left += k * k
        whole += c * c
    return left, whole


@compiled
def _add(integers, sums):
    for i in range(len(integers)):
        sums[i] += integers[i]


@compiled
def _arrived(integers, entry, out):
    for i in range(len(integers)):
        out[i] = min(max(np.float32(UNIT) * np.float32(integers[i]) + entry[i], -_MOST), _MOST)


@compiled
def _move(entry, sums, total):
    # float64 has quotients of such numbers so near that their floor is right
    for i in range(len(sums)):
        moved = np.float64(entry[i]) + np.floor((2 * UNIT * np.float64(sums[i]) + total) / (2 * total))
        entry[i] = np.float32(min(max(moved, -LARGEST), LARGEST))
