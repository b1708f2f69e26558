"""The codebook of q's option codebook: rows that both ends have seen, of which one predicts each row of a message.

A hidden state is mostly like an earlier one, of the same token in a like place. So both ends keep some decoded rows,
the sender names the nearest entry for each row, and what is left is sent. An entry is a row over its scale, in 16ths of
an integer. With integers k of a row whose entry is e, the row that both ends have is c = e + 16 k. After a message of
training, the m-th, both ends do the same:

    sum(k^2) of 16 k over 1/3 of sum(c^2)   the row is unlike its entry: it becomes an entry of its own
    any other row                           its entry moves: e = e + 16 sum(k) / (n + r), rounded

where r rows of the message have that entry, and n is how many it had before, at most 16: so an entry follows the
weights as they change. New entries take the places that were used least lately, the lower first. All of this is in
whole numbers, so both ends agree on all machines. Which entry is the nearest only the sender must know.

Entry 0 is no entry: it predicts zeros, and stays.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

HIDDEN = (2, 3)
"""Dimensions of tensors whose rows have entries: those of tokens, not of images."""
UNIT = 16
"""Parts of an integer."""
MOST_ENTRIES = 1 << 16
_MOST_ROWS = 16
_UNLIKE = 3
_LARGEST = 32767
_SEARCHED = 128
"""So many values of a row, evenly apart, tell its nearest entry nearly as well as all."""
_PART = 1024
"""Rows whose distances to all entries are in memory at a time."""
COUNT, LAST, EXTRA = -2, -1, 2
"""The columns behind an entry: its rows, and the number of the last message that used it; and how many columns."""


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

    def nearest(self, rows: Tensor) -> Tensor:
        """The entry that is nearest to each row, int64 [R]; `rows` are float32 [R, width] over their scales."""
        table, every = self._table(), max(1, self.width // _SEARCHED)
        entries = table[:, : self.width : every] / UNIT
        sizes = entries.square().sum(1).masked_fill_(table[:, COUNT] == 0, torch.inf)
        sizes[0] = 0
        parts = [torch.addmm(sizes, part[:, ::every], entries.T, alpha=-2).argmin(1) for part in rows.split(_PART)]
        return torch.cat(parts)

    def predicted(self, entries: Tensor) -> Tensor:
        """What these entries, int64 [R], predict: float32 [R, width], multiples of 1/16."""
        return self._table()[entries, : self.width] / UNIT

    def see(self, entries: Tensor, integers: Tensor) -> None:
        """Keep the entries, int64 [R], and the integers, int16 [R, width], of a message for `learn`."""
        self._seen = entries, integers

    def learn(self) -> None:
        """Update the entries by the last message that was seen."""
        assert self._seen is not None, "a message is encoded or decoded before it is learned from"
        (entries, integers), self._seen = self._seen, None
        table = self._table()
        own, count, last = table[:, : self.width], table[:, COUNT], table[:, LAST]
        now = last.max() + 1
        moved = UNIT * integers.float()
        rows = own[entries] + moved
        # float64 has the sums of these whole numbers exactly, in any order
        left, whole = (each.double().square_().sum(1) for each in (moved, rows))
        unlike = _UNLIKE * left > whole
        # 1. Entries that have rows like them move.
        alike = (~unlike & (entries > 0)).nonzero().squeeze(1)
        at, which, found = entries[alike].unique(return_inverse=True, return_counts=True)
        sums = torch.zeros(len(at), self.width, dtype=torch.int32, device=table.device)
        sums.index_add_(0, which, integers[alike].int())
        total = (count[at].long() + found).unsqueeze(1)
        change = torch.div(2 * UNIT * sums.long() + total, 2 * total, rounding_mode="floor")
        own[at] = (own[at] + change).clamp_(-_LARGEST, _LARGEST)
        count[at] = (count[at] + found).clamp_(max=_MOST_ROWS)
        last[at] = now
        # 2. Rows like no entry take the places that no row of this message has, the oldest first.
        ages, places = last[1:].sort(stable=True)
        new = unlike.nonzero().squeeze(1)[: int((ages < now).sum())]
        places = places[: len(new)] + 1
        own[places] = rows[new].clamp_(-_LARGEST, _LARGEST)
        count[places], last[places] = 1, now
        self._changed()
