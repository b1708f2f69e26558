"""The codes of q's option step, of 8 bits: each column's by how often they occur in columns much like it.

payload     | T, uint32 | the inner payload, but its codes | the class of each column, 3 bits | the codes, coded |

T counts all bytes that are sent, as in entropy.py; if coding makes the codes no shorter, they follow the head as they
are, and T is `nbytes`. Columns are the elements of one index of the last dimension, or of the second one from four
dimensions on. They are sorted by the mean size of their codes, cut into eight classes, and coded one after the other;
each class begins a block of its own, with a table of its own. Where a column has fewer than 64 elements, or the tensor
fewer than 65,536, all are of one class, and none is sent.

On the residual stream of a language model this takes 0.1 to 0.3 bits less than one table for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from thinwire.compress.codecs.coding.bits import pack, packed_size, unpack
from thinwire.compress.codecs.coding.entropy import Coded
from thinwire.compress.codecs.coding.huffman import huffman, unhuffman_exactly
from thinwire.compress.codecs.granularity import Blocks

_CLASSES, _CLASS_BITS = 8, 3
_LEAST_COLUMN, _LEAST_TENSOR = 64, 1 << 16
_ZERO = 128


@dataclass(frozen=True)
class ColumnCoded(Coded):
    """Codes of 8 bits are coded by class of their column."""

    columns: Callable[[Sequence[int]], Blocks]
    """Gives the columns of a tensor of this shape, as blocks."""

    def _coded(self, codes: Tensor, shape: Sequence[int]) -> Tensor:
        columns = self._classified(shape)
        if columns is None:
            return huffman(codes)
        by_column = codes.view(columns.outer, columns.count, columns.inner).transpose(0, 1)
        order = by_column.to(torch.int16).sub_(_ZERO).abs_().sum((1, 2)).argsort(stable=True)
        classes = torch.empty(columns.count, dtype=torch.uint8)
        bounds = [columns.count * part // _CLASSES for part in range(_CLASSES + 1)]
        for part, (start, stop) in enumerate(pairwise(bounds)):
            classes[order[start:stop]] = part
        packed = torch.empty(packed_size(columns.count, _CLASS_BITS), dtype=torch.uint8)
        pack(classes, _CLASS_BITS, packed)
        # within a class columns keep their order, which the receiver knows
        sorted_codes = by_column[classes.argsort(stable=True)]
        return torch.cat([packed, huffman(*(sorted_codes[start:stop] for start, stop in pairwise(bounds)))])

    def _codes(self, coded: Tensor, shape: Sequence[int]) -> Tensor:
        columns = self._classified(shape)
        if columns is None:
            return unhuffman_exactly(coded, prod(shape))
        packed, rest = coded.tensor_split([packed_size(columns.count, _CLASS_BITS)])
        symbols = unhuffman_exactly(rest, prod(shape)).view(columns.count, columns.outer, columns.inner)
        codes = torch.empty(columns.outer, columns.count, columns.inner, dtype=torch.uint8)
        codes.transpose(0, 1)[unpack(packed, _CLASS_BITS, columns.count).argsort(stable=True)] = symbols
        return codes.view(-1)

    def _classified(self, shape: Sequence[int]) -> Blocks | None:
        """The columns, if they are sorted into classes."""
        columns, n = self.columns(shape), prod(shape)
        return columns if n >= _LEAST_TENSOR and columns.outer * columns.inner >= _LEAST_COLUMN else None
