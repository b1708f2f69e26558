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

import torch
from torch import Tensor

UNIT = 16
"""Parts of an integer."""
MOST_ROWS, UNLIKE, LARGEST = 16, 3, 32767
COUNT, LAST, EXTRA = -2, -1, 2
"""The columns behind an entry: its rows, and the number of the last message that used it; and how many columns."""
_LARGEST_FLOAT = torch.finfo(torch.float32).max


def units_of(scales: Tensor) -> Tensor:
    """The distances of integers, float32 [R, 1], of scales that are bf16 as int16 [R]."""
    return (scales.int() << 16).view(torch.float32).unsqueeze(1)


def limits_of(units: Tensor, last: int) -> Tensor:
    """The largest integers whose values float32 has, up to `last`."""
    return (_LARGEST_FLOAT / units).floor_().clamp_(max=last)


def unpredicted(rows: Tensor, scales: Tensor, table: Tensor, last: int, entries: Tensor) -> tuple[Tensor, Tensor]:
    """What entries, int64 [R], leave of rows, float32 [R, width]: entries, and integers, int16 [R * width].

    An entry beside which a row needs an integer beyond `last` becomes 0.
    """
    units = units_of(scales)
    limits = limits_of(units, last)
    usable = units.isfinite() & (units > 0)
    over = torch.where(usable, torch.minimum(torch.maximum(rows / units, -limits), limits), 0)
    left = over - table[entries, :-EXTRA] / UNIT
    fits = usable & (left.abs().amax(1, keepdim=True) <= last)
    integers = torch.where(fits, left, over).round_().to(torch.int16)
    return entries * fits.squeeze(1), integers.view(-1)


def values(integers: Tensor, scales: Tensor, table: Tensor, entries: Tensor) -> Tensor:
    """Integers [R * width], with what entries predict, times scales: float32 [R * width]."""
    whole = integers.view(len(entries), -1).float() + table[entries, :-EXTRA] / UNIT
    return (whole * units_of(scales)).clamp_(-_LARGEST_FLOAT, _LARGEST_FLOAT).view(-1)


def update(table: Tensor, entries: Tensor, integers: Tensor) -> None:
    """Update a table, float32 [entries, width + 2], whole numbers, by the entries [R] and integers [R, width] of rows.

    codecs/fused/codebook_kernels.py has the same in one kernel for a CPU.
    """
    own, count, last = table[:, :-EXTRA], table[:, COUNT], table[:, LAST]
    now = last.amax() + 1
    moved = UNIT * integers.float()
    rows = own[entries] + moved
    # float64 has the sums of these whole numbers exactly, in any order
    left, whole = (each.double().square_().sum(1) for each in (moved, rows))
    unlike = UNLIKE * left > whole
    # 1. Entries that have rows like them move. All are gone through, because on a GPU nobody may wait for their number.
    alike = ~unlike & (entries > 0)
    found = torch.zeros(len(table), dtype=torch.int32, device=table.device).index_add_(0, entries, alike.int())
    sums = torch.zeros(own.shape, dtype=torch.int32, device=table.device)
    sums.index_add_(0, entries, integers.int() * alike.unsqueeze(1))
    total = (count + found).double().clamp_(min=1).unsqueeze(1)
    # and quotients of them so near that their floor is right; of no rows it is 0
    own.copy_((own + ((2 * UNIT * sums + total) / (2 * total)).floor_()).clamp_(-LARGEST, LARGEST))
    count.copy_((count + found).clamp_(max=MOST_ROWS))
    last.copy_(torch.where(found > 0, now, last))
    # 2. Rows like no entry take the places that no row of this message has, the oldest first.
    ages, places = last[1:].sort(stable=True)
    first = unlike.to(torch.uint8).sort(descending=True, stable=True).indices[: len(places)]
    goes = unlike[first] & (ages[: len(first)] < now)
    places = places[: len(first)] + 1
    own[places] = torch.where(goes.unsqueeze(1), rows[first].clamp_(-LARGEST, LARGEST), own[places])
    count[places], last[places] = torch.where(goes, 1, count[places]), torch.where(goes, now, last[places])
