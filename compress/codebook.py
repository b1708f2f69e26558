"""The codebook of q's option codebook at one end of a channel: the entries, and what they do for a message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from thinwire.compress.codecs.fused import codebook as kernels
from thinwire.compress.entries import COUNT, UNIT, units_of

_OF_TOKENS = (2, 3)
"""Dimensions of tensors whose rows have entries: those of tokens, not of images."""
_VALUES_OF_ENTRY = 8
"""A message of fewer values for each entry takes longer to predict than it saves."""
MOST_ENTRIES = 1 << 16
_SEARCHED = 128
"""So many values of a row, evenly apart, tell its nearest entry nearly as well as all."""
_PART, _PART_OF_GPU = 1 << 22, 1 << 25
"""Distances of rows to entries that are in memory at a time: on a GPU many, because each part is two launches."""


def predicts(entries: int, shape: Sequence[int]) -> bool:
    """Whether so many entries predict the rows of a tensor."""
    return entries > 0 and len(shape) in _OF_TOKENS and prod(shape) >= _VALUES_OF_ENTRY * entries


class Codebook:
    """The entries that one end of a channel keeps for rows of `width` values.

    Args:
        width: the values of a row.
        table: gives float32 [entries, width + 2], which is changed in place: whole numbers, zeros at first.
        changed: called after each change.
    """

    def __init__(self, width: int, table: Callable[[], Tensor], changed: Callable[[], None]) -> None:
        self.width, self._table, self._changed = width, table, changed
        self._seen: tuple[Tensor, Tensor] | None = None

    def predict(self, rows: Tensor, scales: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """The entry of each row, int64 [R], and the integers, int16 [R * width], of what it leaves.

        Args:
            rows: float32 [R, width].
            scales: bf16 as int16 [R]; an infinite one, NaN or 0 has entry 0, and zeros.
            last: the largest integer; a row that needs a larger one beside its entry has entry 0.
        """
        table, every = self._table(), max(1, self.width // _SEARCHED)
        entries = self._nearest(table, rows[:, ::every] / units_of(scales), every)
        return kernels.unpredicted(rows, scales, table, last, entries)

    def _nearest(self, table: Tensor, rows: Tensor, every: int) -> Tensor:
        """The nearest entry of rows over their scales, of which there are some columns."""
        some = table[:, : self.width : every] / UNIT
        sizes = some.square().sum(1).masked_fill_(table[:, COUNT] == 0, torch.inf)
        sizes[0] = 0
        parts = rows.split(max(1, (_PART if rows.is_cpu else _PART_OF_GPU) // len(sizes)))
        return torch.cat([_places_of_least(torch.addmm(sizes, part, some.T, alpha=-2)) for part in parts])

    def values(self, integers: Tensor, scales: Tensor, entries: Tensor, out: Tensor) -> None:
        """Write integers [R * width], with what entries predict, times scales into float32 `out` [R * width].

        A sum may be half an integer beyond the largest number of float32, and is cut there.
        """
        kernels.values(integers, scales, self._table(), entries, out)

    def see(self, entries: Tensor | None, integers: Tensor) -> None:
        """Keep the entries, int64 [R], and the integers, int16 [R, width], of a message for `learn`; None has none."""
        self._seen = None if entries is None else (entries, integers)

    def learn(self) -> None:
        """Update the entries by the message that was encoded or decoded last."""
        if self._seen is None:
            return
        (entries, integers), self._seen = self._seen, None
        kernels.learn(self._table(), entries, integers)
        self._changed()


def _places_of_least(distances: Tensor) -> Tensor:
    """Where the least distance of each row is first; on a CPU by NumPy, which takes a tenth of torch's time."""
    return torch.from_numpy(distances.numpy().argmin(1)) if distances.is_cpu else distances.argmin(1)
