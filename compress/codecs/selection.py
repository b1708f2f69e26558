"""Selection: the places of the k largest integers of a row, with NumPy on a CPU. Of equals the first count.

NumPy's partition is 20 times as fast as torch's topk where its vectorised form is fast, and on processors with a slow
AVX-512 compress instruction (AMD's Zen 4) several times slower. So a sample of a long row gives a threshold that a
little more than k elements exceed, and only these are parted.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Integers = NDArray[Any]
Places = NDArray[np.int64]

_BLOCK = 1 << 17
"""Elements handled at a time. A larger copy does not fit the cache, and takes memory that the system may clear and take
back each time, which costs more than the partition."""
_LONG = 1 << 13
"""A row of fewer elements is parted as a whole."""
_SAMPLE = 1 << 12
_NEIGHBOURS = 4
"""Elements of a sample that follow each other, because they come into the cache together."""
_DEVIATIONS = 4
"""How many standard deviations the sample's threshold lies below the expected one: it is too high once in 30,000 rows,
and then the row is parted as a whole."""


def places_of_largest(rows: Integers, mask: int, k: int) -> Places:
    """The places of the `k` largest `integers & mask` of each row of integers [N, n]: [N, k], counted over all rows.

    `k` is at least 1 and below n.
    """
    samples, n = rows.shape
    if n < _LONG:
        return _of_rows(rows, mask, k)
    places, room = np.empty((samples, k), np.int64), _Room(min(n, _BLOCK), rows.dtype, k / n)
    for index, row in enumerate(rows):
        np.add(_of_long_row(row, mask, k, room), index * n, out=places[index])
    return places


def repetitive(rows: Integers) -> bool:
    """Whether one value makes up a quarter of a sample of `rows`, and so perhaps half of a row.

    On such a row, for example with the zeros after a ReLU, NumPy's partition takes 40 times as long, more than sorting:
    its vectorised form makes no progress with a pivot that is the smallest value.
    """
    sample = np.sort(rows.reshape(-1)[:: rows.size // 1024 + 1])
    quarter = len(sample) // 4
    return bool((sample[quarter:] == sample[: len(sample) - quarter]).any())


class _Room:
    """Memory that all blocks use in turns: fresh memory is not in the cache, and takes four times as long to fill."""

    def __init__(self, size: int, dtype: np.dtype[Any], share: float) -> None:
        self.size, self.masked, self.marks = size, np.empty(size, dtype), _padded(size, share)


def _of_long_row(row: Integers, mask: int, k: int, room: _Room) -> Places:
    threshold = _threshold(row, mask, k)
    places, values = _above(row, mask, threshold, room)
    if len(places) >= k:
        least = _least(values.copy(), k)
    else:  # many are equal to the threshold, as after a ReLU, or it is too high
        places, values = _above(row, mask, threshold - 1, room)
        least = threshold
    if len(places) < k:
        places, values = np.arange(len(row)), row & mask
        least = _least(values.copy(), k)
    kept = values >= least
    if extra := int(np.count_nonzero(kept)) - k:
        equal = np.flatnonzero(values == least)
        kept[equal[len(equal) - extra :]] = False
    return places.take(np.flatnonzero(kept))


def _threshold(row: Integers, mask: int, k: int) -> int:
    """A number that a little more than `k` elements of `row & mask` are likely to be above."""
    # An odd step: an even one might hit the same channel of each position.
    step = len(row) * _NEIGHBOURS // min(_SAMPLE, len(row) // 8) | 1
    sample = row[: len(row) // step * step].reshape(-1, step)[:, :_NEIGHBOURS].flatten() & mask
    expected = len(sample) * k / len(row)
    rank = int(expected + _DEVIATIONS * (expected * (1 - k / len(row))) ** 0.5) + 2
    return _least(sample, rank) if rank <= len(sample) else int(np.iinfo(row.dtype).min)


def _above(row: Integers, mask: int, threshold: int, room: _Room) -> tuple[Places, Integers]:
    """The places and the values of all elements of `row & mask` above `threshold`, ascending by place."""
    places, values = [], []
    for start in range(0, len(row), room.size):
        part = row[start : start + room.size]
        masked = np.bitwise_and(part, mask, out=room.masked[: len(part)])
        marks = room.marks[room.size - len(part) :]
        np.greater(masked, threshold, out=marks[: len(part)])
        found = np.flatnonzero(marks)[: len(part) - len(marks)]
        values.append(masked.take(found))
        places.append(found + start if start else found)
    return np.concatenate(places), np.concatenate(values)


def _padded(size: int, share: float) -> NDArray[np.bool_]:
    """Room for `size` marks, of which this share or a little more are ones; and ones after it, if needed.

    If at most a tenth are ones, NumPy searches for them with a method for sparse arrays. At a tenth that takes three
    times as long, so the rest keeps the share above it.
    """
    rest = max(0, int((0.1 - share) * size / 0.9)) + size // 100 + 1
    padded = np.empty(size + rest, np.bool_)
    padded[size:] = True
    return padded


def _least(values: Integers, k: int) -> int:
    """The k-th largest of `values`. May change their order."""
    wide = values.astype(np.promote_types(values.dtype, np.int32), copy=False)  # NumPy parts int16 one by one
    return int(_least_of_rows(wide[None], k)[0, 0])


def _least_of_rows(rows: Integers, k: int) -> Integers:
    """The k-th largest of each row: [N, 1]. Changes the order in `rows`."""
    n = rows.shape[1]
    if repetitive(rows):
        rows.sort(axis=1)
    else:
        rows.partition(n - k, axis=1)
    return rows[:, n - k, None]


def _of_rows(rows: Integers, mask: int, k: int) -> Places:
    samples, n = rows.shape
    padded = _padded(samples * n, k / n)
    kept = padded[: samples * n].reshape(samples, n)
    least = np.empty((samples, 1), np.promote_types(rows.dtype, np.int32))
    for block in _blocks(samples, n):
        masked = np.empty(rows[block].shape, least.dtype)
        np.bitwise_and(rows[block], mask, out=masked)
        least[block] = _least_of_rows(masked, k)
        np.greater_equal(np.bitwise_and(rows[block], mask, out=masked), least[block], out=kept[block])
    places = np.flatnonzero(padded)[: kept.size - padded.size]
    if len(places) > samples * k:
        places = _without_last_equals(places, rows, mask, least, k)
    return places.reshape(samples, k)


def _without_last_equals(places: Places, rows: Integers, mask: int, least: Integers, k: int) -> Places:
    """`places` of the values at or above `least` [N, 1], cut to k a row: the last of those equal to `least` go."""
    samples, n = rows.shape
    ends = np.searchsorted(places, n * np.arange(1, samples + 1))
    counts = np.diff(ends, prepend=0)
    equal = (rows.reshape(-1)[places] & mask) == np.repeat(least, counts)
    rank = torch.from_numpy(equal).cumsum(0).numpy()  # eight times as fast as NumPy's
    allowed = rank[ends - 1] - (counts - k)
    kept: Places = places[~equal | (rank <= np.repeat(allowed, counts))]
    return kept


def _blocks(samples: int, n: int) -> Iterator[slice]:
    """Yield the rows to handle at a time, of `samples` with `n` elements each."""
    step = max(1, _BLOCK // n)
    for start in range(0, samples, step):
        yield slice(start, min(start + step, samples))
