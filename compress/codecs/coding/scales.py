"""Which class each integer of a message has: the sum of its column's class and its row's offset.

Integers are seen as [rows, columns, inner], as granularity.py has it for `channel`. The sender chooses, from this
message alone and in whole numbers, so that all machines choose alike; three lists of small integers tell the receiver:

    means       what is taken off the integers of each column
    columns     the class of each column
    rows        what is added to it in each row; a class below 0 is 0, and one above 67 is 67

    list        | least, int8 | width, uint8 | each less the least, in `width` bits, packed |

If all are equal the width is 0, and nothing follows. What does not pay for its list is 0 throughout, or the class of
all: a message of few rows has no means and one class.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from thinwire.compress.codec import CodecError
from thinwire.compress.codecs.coding.bits import pack, packed_size, unpack
from thinwire.compress.codecs.coding.lanes import require_bytes
from thinwire.compress.codecs.coding.tables import CLASSES, LARGEST, OWN, UNIT, classes
from thinwire.compress.transfer import put

MOST_OFFSET = 36
RARE = 32
_HEAD = 2
MOST_WIDTH = 8


@dataclass(frozen=True)
class Scales:
    """What is taken off, and the classes: int64 [columns], [columns] and [rows]."""

    means: Tensor
    columns: Tensor
    rows: Tensor

    def classes(self) -> Tensor:
        """The class of each integer, [rows, columns, 1]."""
        return (self.columns + self.rows.unsqueeze(1)).clamp_(0, CLASSES - 1).unsqueeze(2)

    @property
    def planes(self) -> Tensor:
        """How many symbols an integer has, int64 []: 2 if any sends low bits apart, else 1."""
        return (self.columns.max() + self.rows.max() >= OWN) + 1

    def packed(self) -> list[Tensor]:
        """The three lists, in parts."""
        return [part for values in (self.means, self.columns, self.rows) for part in _packed(values)]

    @staticmethod
    def read(coded: Tensor, rows: int, columns: int) -> "tuple[Scales, Tensor]":
        """What three lists at the begin of these bytes say, and the bytes behind them; CodecError if they are none."""
        means, coded = _unpacked(coded, columns)
        kinds, coded = _unpacked(coded, columns)
        offsets, coded = _unpacked(coded, rows)
        return Scales(means, kinds, offsets), coded


def choose(values: Tensor) -> Scales:
    """The scales of integers, int32 [rows, columns, inner].

    A few massive ones have no say: beyond 127, and beyond 32 times the mean size of all, they count as that.
    """
    (rows, columns, inner), size = values.shape, values.shape[0] * values.shape[2]
    least, slope, bounds, with_offsets = known(values.device)
    most = (RARE * values.abs().sum() // (size * columns)).clamp_(min=LARGEST).int()
    cut = values.clamp(-most, most)
    sizes = cut.abs().sum((0, 2))
    means = torch.div(2 * cut.sum((0, 2)) + size, 2 * size, rounding_mode="floor").clamp_(-LARGEST, LARGEST)
    centred = (cut - means.int().unsqueeze(1)).abs_().sum((0, 2))
    means = torch.where(centred < sizes, means, 0)  # a column that is mostly zero keeps its zeros
    ways = torch.stack([sizes, sizes, torch.minimum(sizes, centred)])
    mean_sizes = (ways << UNIT) // size
    mean_sizes[0] = (sizes.sum() << UNIT) // (size * columns)
    kinds = torch.searchsorted(bounds, mean_sizes, right=True)
    costs = (size * least[kinds] + ways * slope[kinds]).sum(1) + _bits_of_list(kinds)
    costs[2] += _bits_of_list(means)
    best = int(costs.argmin())
    means, chosen = means if best == 2 else torch.zeros_like(means), kinds[best]
    left = (cut - means.int().unsqueeze(1)).abs_().sum((1, 2))
    sized, base, steep = (torch.bincount(chosen, minlength=CLASSES) * with_offsets).sum(-1)
    expected, base, steep = inner * sized, inner * base, steep // sized
    found = torch.searchsorted((expected[1:] + expected[:-1]) // 2, left << UNIT, right=True)
    still = rows * base[MOST_OFFSET] + left.sum() * steep[MOST_OFFSET]
    moved = (base[found] + left * steep[found]).sum() + _bits_of_list(found) < still
    return Scales(means, chosen, torch.where(moved, found - MOST_OFFSET, 0))


@cache
def known(device: torch.device) -> list[Tensor]:
    """`least`, `slope` and `bounds` of the classes; and by a row's offset their mean, least, and mean times slope."""
    made, offsets = classes(), np.arange(-MOST_OFFSET, MOST_OFFSET + 1)[:, None]
    around = (np.arange(CLASSES) + offsets).clip(0, CLASSES - 1)
    with_offsets = np.stack([made.mean, made.least, made.mean * made.slope])[:, around]
    return [put(torch.from_numpy(each), device) for each in (made.least, made.slope, made.bounds, with_offsets)]


def _width_of(values: Tensor) -> Tensor:
    """The bits of the largest less the least of each list [.., n], int64."""
    extent = values.amax(-1, keepdim=True) - values.amin(-1, keepdim=True)
    return (extent >= 1 << torch.arange(MOST_WIDTH, device=values.device)).sum(-1)


def _bits_of_list(values: Tensor) -> Tensor:
    """The size of each list [.., n], in units of 2**-16 bits."""
    return _width_of(values) * values.shape[-1] << UNIT


def _packed(values: Tensor) -> list[Tensor]:
    """The bytes of a list."""
    least, width = int(values.min()), int(_width_of(values))
    head = torch.tensor([least & 255, width], dtype=torch.uint8, device=values.device)
    packed = torch.empty(packed_size(len(values), width), dtype=torch.uint8, device=values.device)
    if width:
        pack((values - least).to(torch.uint8), width, packed)
    return [head, packed]


def _unpacked(coded: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """A list of `n` integers, int64, and the bytes behind it."""
    require_bytes(coded, _HEAD)
    least, width = coded[:_HEAD].tolist()
    least -= (least & 128) << 1
    if width > MOST_WIDTH:
        raise CodecError(f"a payload's list of integers must have at most {MOST_WIDTH} bits each, got {width}")
    size = packed_size(n, width)
    require_bytes(coded, _HEAD + size)
    packed, rest = coded[_HEAD:].tensor_split([size])
    if not width:
        return torch.full((n,), least, dtype=torch.int64, device=coded.device), rest
    return unpack(packed, width, n).long() + least, rest
