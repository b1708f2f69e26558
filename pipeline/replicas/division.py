"""Who sums what: the gradients of a stage as rows of one matrix, in buckets with a part for each replica.

    rows      | 0  1  2  3  4 | 5  6  7  8  9 | 10 11 12 |     of 512 elements or 4096, see layout.py
    buckets   |      0        |      1        |    2     |     frames of one bucket travel while the next is encoded
    owners    | 0  0  1  1  2 | 0  0  1  1  2 | 0  1   2 |     of three replicas

The owner of a part gets it from every replica, adds up, and sends the sum to all. The last parts of a bucket may be
shorter, or empty if it has fewer rows than there are replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

BUCKET = 1 << 22
"""The most elements of a bucket: 16 MiB of float32."""


@dataclass(frozen=True)
class Bucket:
    """Consecutive rows that are exchanged together."""

    index: int
    parts: tuple[range, ...]
    """The rows of each owner, in the order of the replicas."""

    @property
    def rows(self) -> range:
        """All rows."""
        return range(self.parts[0].start, self.parts[-1].stop)


def divide(rows: int, replicas: int, bucket: int, first: int = 0) -> list[Bucket]:
    """The buckets of a number of rows, of at most `bucket` rows each, numbered from `first` on; none without rows."""
    starts = range(0, rows, bucket)
    return [
        Bucket(index, _parts(range(start, min(rows, start + bucket)), replicas))
        for index, start in enumerate(starts, first)
    ]


def _parts(rows: range, count: int) -> tuple[range, ...]:
    """Rows in `count` ranges that differ by one row at most, the longer ones first."""
    each, longer = divmod(len(rows), count)
    stops = [rows.start + each * (index + 1) + min(index + 1, longer) for index in range(count)]
    return tuple(range(start, stop) for start, stop in zip([rows.start, *stops], stops, strict=False))
