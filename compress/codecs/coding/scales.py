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
_MOST_WIDTH = 8


@dataclass(frozen=True)
class Scales:
    """What is taken off, and the classes: int64 [columns], [columns] and [rows]."""

    means: Tensor
    columns: Tensor
    rows: Tensor

    def classes(self) -> Tensor:
        """The class of each integer, int16 [rows, columns, 1]."""
        return (self.columns.short() + self.rows.short().unsqueeze(1)).clamp_(0, CLASSES - 1).unsqueeze(2)

    def packed(self) -> tuple[list[Tensor], bool]:
        """The three lists, in parts, and whether any integer sends low bits apart; looks at a GPU once."""
        lists = self.means, self.columns, self.rows
        told = [told for values in lists for told in (values.min(), _width_of(values))]
        *looked, most = torch.stack([*told, self.columns.max() + self.rows.max()]).tolist()
        parts = [_packed(*each) for each in zip(lists, looked[::2], looked[1::2], strict=True)]
        return [part for pair in parts for part in pair], most >= OWN

    @staticmethod
    def read(coded: Tensor, rows: int, columns: int) -> "tuple[Scales, Tensor, bool]":
        """What three lists at the begin of these bytes say, the bytes behind them, and whether there are low bits.

        Looks at a GPU once. Raises CodecError if they are none.
        """
        lists, head = list[Tensor](), coded[: 3 * _HEAD + 2 * columns + rows].cpu()
        behind = head
        for count in (columns, columns, rows):
            values, behind = _unpacked(behind, count)
            lists.append(values)
        has_low_bits = int(lists[1].max() + lists[2].max()) >= OWN
        return Scales(*(put(each, coded.device) for each in lists)), coded[len(head) - len(behind) :], has_low_bits


def choose(values: Tensor) -> Scales:
    """The scales of integers, int32 [rows, columns, inner].

    A few massive ones have no say: beyond 127, and beyond 32 times the mean size of all, they count as that.
    """
    rows, columns, inner = values.shape
    known, device, size = classes(), values.device, rows * inner
    mean, least, slope, bounds = (
        put(torch.from_numpy(each), device) for each in (known.mean, known.least, known.slope, known.bounds)
    )
    most = (RARE * values.abs().sum() // values.numel()).clamp_(min=LARGEST)
    values = values.clamp(-most, most)
    sizes, sums = (each.sum((0, 2), dtype=torch.int64) for each in (values.abs(), values))
    means = torch.div(2 * sums + size, 2 * size, rounding_mode="floor").clamp_(-LARGEST, LARGEST)
    centred = (values - means.int().unsqueeze(1)).abs().sum((0, 2), dtype=torch.int64)
    means = torch.where(centred < sizes, means, 0)  # a column that is mostly zero keeps its zeros
    ways = torch.stack([sizes, sizes, torch.minimum(sizes, centred)])
    mean_sizes = (ways << UNIT) // size
    mean_sizes[0] = (sizes.sum() << UNIT) // (size * columns)
    kinds = torch.searchsorted(bounds, mean_sizes, right=True)
    costs = (size * least[kinds] + ways * slope[kinds]).sum(1) + _bits_of_list(kinds)
    costs[2] += _bits_of_list(means)
    best = costs.argmin()
    means, chosen = torch.where(best == 2, means, 0), kinds.index_select(0, best.view(1)).squeeze(0)
    left = (values - means.int().unsqueeze(1)).abs().sum((1, 2), dtype=torch.int64)
    offsets = torch.arange(-MOST_OFFSET, MOST_OFFSET + 1, device=device)
    around = (chosen + offsets.unsqueeze(1)).clamp_(0, CLASSES - 1)
    sized = mean[around]
    expected, base = inner * sized.sum(1), inner * least[around].sum(1)
    steep = (sized * slope[around]).sum(1) // sized.sum(1)
    found = torch.searchsorted((expected[1:] + expected[:-1]) // 2, left << UNIT, right=True)
    still = rows * base[MOST_OFFSET] + left.sum() * steep[MOST_OFFSET]
    moved = (base[found] + left * steep[found]).sum() + _bits_of_list(found) < still
    return Scales(means, chosen, torch.where(moved, found - MOST_OFFSET, 0))


def _width_of(values: Tensor) -> Tensor:
    """The bits of the largest less the least of each list [.., n], int64."""
    extent = values.amax(-1, keepdim=True) - values.amin(-1, keepdim=True)
    return (extent >= 1 << torch.arange(_MOST_WIDTH, device=values.device)).sum(-1)


def _bits_of_list(values: Tensor) -> Tensor:
    """The size of each list [.., n], in units of 2**-16 bits."""
    return _width_of(values) * values.shape[-1] << UNIT


def _packed(values: Tensor, least: int, width: int) -> list[Tensor]:
    """The bytes of a list."""
    head = put(torch.tensor([least & 255, width], dtype=torch.uint8), values.device)
    packed = torch.empty(packed_size(len(values), width), dtype=torch.uint8, device=values.device)
    if width:
        pack((values - least).to(torch.uint8), width, packed)
    return [head, packed]


def _unpacked(coded: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """A list of `n` integers, int64, and the bytes behind it."""
    require_bytes(coded, _HEAD)
    least, width = coded[:_HEAD].tolist()
    least -= (least & 128) << 1
    if width > _MOST_WIDTH:
        raise CodecError(f"a payload's list of integers must have at most {_MOST_WIDTH} bits each, got {width}")
    size = packed_size(n, width)
    require_bytes(coded, _HEAD + size)
    packed, rest = coded[_HEAD:].tensor_split([size])
    if not width:
        return torch.full((n,), least, dtype=torch.int64, device=coded.device), rest
    return unpack(packed, width, n).long() + least, rest
