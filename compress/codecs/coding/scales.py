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
        """The class of each integer, [rows, columns, 1]."""
        return (self.columns + self.rows.unsqueeze(1)).clamp_(0, CLASSES - 1).unsqueeze(2)

    @property
    def has_low_bits(self) -> bool:
        """Whether any integer sends low bits apart."""
        return int(self.columns.max() + self.rows.max()) >= OWN

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
    most = max(LARGEST, RARE * int(values.abs().sum(dtype=torch.int64)) // values.numel())
    values = values.clamp(-most, most)
    known, device = classes(), values.device
    mean, least, slope, bounds = (
        torch.from_numpy(each).to(device) for each in (known.mean, known.least, known.slope, known.bounds)
    )
    rows, columns, inner = values.shape
    size, zeros = rows * inner, torch.zeros(columns, dtype=torch.int64, device=device)

    def kinds(sizes: Tensor, count: int) -> Tensor:
        return torch.searchsorted(bounds, (sizes << UNIT) // count, right=True)

    def cost(kinds: Tensor, sizes: Tensor) -> int:
        return int((size * least[kinds] + sizes * slope[kinds]).sum())

    sizes, sums = (each.sum((0, 2), dtype=torch.int64) for each in (values.abs(), values))
    means = torch.div(2 * sums + size, 2 * size, rounding_mode="floor").clamp_(-LARGEST, LARGEST)
    centred = (values - means.int().unsqueeze(1)).abs().sum((0, 2), dtype=torch.int64)
    means = torch.where(centred < sizes, means, 0)  # a column that is mostly zero keeps its zeros
    centred = torch.minimum(sizes, centred)
    one = kinds(sizes.sum(), size * columns).expand(columns)
    plain, apart = kinds(sizes, size), kinds(centred, size)
    costs = [
        cost(one, sizes),
        cost(plain, sizes) + _bits_of_list(plain),
        cost(apart, centred) + _bits_of_list(apart) + _bits_of_list(means),
    ]
    best = costs.index(min(costs))
    means, chosen = (means if best == 2 else zeros), (one, plain, apart)[best]
    left = (values - means.int().unsqueeze(1)).abs().sum((1, 2), dtype=torch.int64)
    offsets = torch.arange(-MOST_OFFSET, MOST_OFFSET + 1, device=device)
    around = (chosen + offsets.unsqueeze(1)).clamp_(0, CLASSES - 1)
    sized = mean[around]
    expected, base = inner * sized.sum(1), inner * least[around].sum(1)
    steep = (sized * slope[around]).sum(1) // sized.sum(1)
    found = torch.searchsorted((expected[1:] + expected[:-1]) // 2, left << UNIT, right=True)
    still = rows * int(base[MOST_OFFSET]) + int(left.sum()) * int(steep[MOST_OFFSET])
    moved = int((base[found] + left * steep[found]).sum()) + _bits_of_list(found) < still
    return Scales(means, chosen, found - MOST_OFFSET if moved else torch.zeros_like(found))


def _width_of(values: Tensor) -> int:
    return int(values.max() - values.min()).bit_length()


def _bits_of_list(values: Tensor) -> int:
    """The size of a list, in units of 2**-16 bits."""
    return _width_of(values) * len(values) << UNIT


def _packed(values: Tensor) -> list[Tensor]:
    """The bytes of a list."""
    least, width = int(values.min()), _width_of(values)
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
    if width > _MOST_WIDTH:
        raise CodecError(f"a payload's list of integers must have at most {_MOST_WIDTH} bits each, got {width}")
    size = packed_size(n, width)
    require_bytes(coded, _HEAD + size)
    packed, rest = coded[_HEAD:].tensor_split([size])
    if not width:
        return torch.full((n,), least, dtype=torch.int64, device=coded.device), rest
    return unpack(packed, width, n).long() + least, rest
