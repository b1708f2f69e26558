"""The codes of q's option step, of 8 bits: less what is likely, coded by what is frequent in columns that are alike.

payload   | T | the inner payload, but its codes | rows apart | weight | class of each column, 3 bits | what is coded |
           uint32                                  bf16         uint8

T counts all bytes that are sent, as in entropy.py; if coding makes the codes no shorter, they follow the head as they
are, and T is `nbytes`. Columns are the elements of one index of the last dimension, or of the second one from four
dimensions on. Where a column has fewer than 64 elements, or the tensor fewer than 65,536, all codes are coded as they
are, row by row, with neither weight nor classes.

Else each code is sent less its column's mean, and every second one of a column less a share of its two neighbors
(`_take_away`). Columns are sorted by the mean size of what is left and cut into eight classes. Coded are the means and
then class by class, within a class column by column: each a block with a table of its own.

On the residual stream of a language model this takes 0.2 to 0.5 bits less than one table for all, of which classes
are 0.1 to 0.3.

A row whose scale is above 16 times the median of all scales goes apart, in bf16, if at most one row in 64 does. Its
scale is 0 in the payload, and its codes are those of zero. Such a row is mostly the first token of a text, in which
pretrained language models keep a few values of thousands: steps in its own unit would lose all its others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.compress.codec import CodecError, tensor_bytes
from thinwire.compress.codecs.cast import saturating_copy
from thinwire.compress.codecs.coding.bits import pack, packed_size, unpack
from thinwire.compress.codecs.coding.entropy import Coded
from thinwire.compress.codecs.coding.huffman import huffman, unhuffman_exactly
from thinwire.compress.codecs.coding.lengths import LENGTH_BYTES, length_of
from thinwire.compress.codecs.granularity import Blocks

_CLASSES, _CLASS_BITS = 8, 3
_LEAST_COLUMN, _LEAST_TENSOR = 64, 1 << 16
_ZERO = 128
_MASSIVE, _ROWS_OF_ONE_APART = 16, 64
_BF16_BYTES = 2
_MAGNITUDE, _TINY = 0x7FFF, 0x0080
"""Of the bits of bf16: all but the sign, and those of the least normal number."""
_WHOLE_BITS = 5
_WHOLE = 1 << _WHOLE_BITS
"""A weight is a number of these parts of the sum of two."""
_ROWS_OF_ONE_READ = 8
"""Of how many rows one is read to find the weight, and to see whether a column keeps its zeros."""
_PART = 1 << 17
"""How many values are worked on at a time, so that what is made of them stays in a processor's cache."""
_NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class ColumnCoded(Coded):
    """Codes of 8 bits are coded by class of their column."""

    columns: Callable[[Sequence[int]], Blocks]
    """Gives the columns of a tensor of this shape, as blocks."""

    rows: bool
    """Whether the inner quantizer's blocks are rows, with a bf16 scale each and nothing before it: some go apart."""

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the inner quantizer's decoded tensor into `out`, and the rows apart."""
        super().decode(payload, out)
        if length_of(payload) == len(payload):  # nothing is coded
            return
        head, _ = self._split(payload[LENGTH_BYTES:], out.shape)
        apart = self._apart(head)
        if len(apart):
            rows = out.view(len(head) // _BF16_BYTES, -1)
            sent = torch.empty(len(apart), rows.shape[1], dtype=torch.bfloat16, device=out.device)
            tensor_bytes(sent).copy_(payload[LENGTH_BYTES + len(head) :][: sent.numel() * _BF16_BYTES])
            saturating_copy(sent, decoded := torch.empty_like(sent, dtype=out.dtype))
            rows[apart] = decoded

    def _coded(self, x: Tensor, plain: Tensor) -> list[Tensor]:
        head, codes = self._split(plain.cpu(), x.shape)
        parts = [head]
        if self.rows:
            scales = head.numpy().view(np.uint16).copy()
            parts = [torch.from_numpy(scales.view(np.uint8))]
            # a scale of 0 means a row apart; that of a row of zeros may be any
            scales[scales & _MAGNITUDE == 0] = _TINY
            apart = _massive(scales)
            if len(apart):
                rows = torch.from_numpy(apart)
                scales[apart] = 0
                codes = codes.view(len(scales), -1).index_fill(0, rows, _ZERO).view(-1)
                parts.append(tensor_bytes(x.detach().reshape(len(scales), -1)[rows].bfloat16()))
        columns = self._classified(x.shape)
        if columns is None:
            return [*parts, huffman(codes)]
        values = _signed(codes).view(columns.outer, columns.count, columns.inner)
        means, weight = _take_away(_along(values))
        order = _column_sums(_along(values), sizes=True).argsort(stable=True)
        classes = torch.empty(columns.count, dtype=torch.uint8)
        bounds = [columns.count * part // _CLASSES for part in range(_CLASSES + 1)]
        for part, (start, stop) in enumerate(pairwise(bounds)):
            classes[order[start:stop]] = part
        packed = torch.empty(packed_size(columns.count, _CLASS_BITS), dtype=torch.uint8)
        pack(classes, _CLASS_BITS, packed)
        # within a class columns keep their order, which the receiver knows
        by_class = _unsigned(_by_column(values).index_select(0, classes.argsort(stable=True)))
        blocks = [_unsigned(means), *(by_class[start:stop] for start, stop in pairwise(bounds))]
        return [*parts, torch.tensor([weight], dtype=torch.uint8), packed, huffman(*blocks)]

    def _codes(self, head: Tensor, coded: Tensor, shape: Sequence[int]) -> Tensor:
        rows_bytes = len(self._apart(head)) * _BF16_BYTES * (prod(shape) * _BF16_BYTES // len(head))
        if rows_bytes > len(coded):
            raise CodecError(f"a payload's rows apart need {rows_bytes} bytes, and {len(coded)} are there")
        coded, columns = coded[rows_bytes:].cpu(), self._classified(shape)
        if columns is None:
            return unhuffman_exactly(coded, prod(shape))
        weight, packed, rest = coded.tensor_split([1, 1 + packed_size(columns.count, _CLASS_BITS)])
        symbols = unhuffman_exactly(rest, columns.count + prod(shape))
        means, by_class = symbols.tensor_split([columns.count])
        order = unpack(packed, _CLASS_BITS, columns.count).argsort(stable=True)
        values = _by_row(_signed(by_class).view(columns.count, -1).index_select(0, order.argsort()), columns)
        _add_up(_along(values), _signed(means), int(weight[0]))
        return _unsigned(values.view(-1))

    def _apart(self, head: Tensor) -> Tensor:
        """The indices of the rows that a payload sends apart, given its scales."""
        if not self.rows:
            return _NONE
        return torch.from_numpy(np.flatnonzero(head.cpu().numpy().view(np.uint16) & _MAGNITUDE == 0))

    def _classified(self, shape: Sequence[int]) -> Blocks | None:
        """The columns, if they are sorted into classes."""
        columns, n = self.columns(shape), prod(shape)
        return columns if n >= _LEAST_TENSOR and columns.outer * columns.inner >= _LEAST_COLUMN else None


def _massive(scales: NDArray[np.uint16]) -> NDArray[np.int64]:
    """The indices of the rows that go apart, given the bf16 scales of all."""
    sizes = ((scales & _MAGNITUDE).astype(np.uint32) << 16).view(np.float32)
    middle = (len(sizes) - 1) // 2
    apart = np.flatnonzero(sizes * np.float32(1 / _MASSIVE) > np.partition(sizes, middle)[middle])
    few = len(apart) * _ROWS_OF_ONE_APART <= len(sizes) and not np.isnan(sizes).any()
    return apart if few else apart[:0]


def _by_column(values: Tensor) -> Tensor:
    """Values [outer, columns, inner] as [columns, outer * inner]."""
    return (
        values.squeeze(2).transpose(0, 1).contiguous().view(values.shape[1], -1)
    )  # of two dimensions: torch is faster


def _by_row(values: Tensor, columns: Blocks) -> Tensor:
    """Values [columns, outer * inner] as [outer, columns, inner]."""
    shape = (columns.outer, columns.count, columns.inner)
    return values.view(columns.count, *shape[::2]).squeeze(2).transpose(0, 1).contiguous().view(shape)


def _along(values: Tensor) -> Tensor:
    """Values [outer, columns, inner] as [length, others, columns]: those of a column that are neighbors come first."""
    return values.permute(0, 2, 1) if values.shape[2] == 1 else values.permute(2, 0, 1)


def _column_sums(values: Tensor, *, sizes: bool = False) -> Tensor:
    """The sums of values [length, others, columns], or of their sizes, int64 [columns].

    torch copies integers into int64 before it adds them up.
    """
    total = torch.zeros(values.shape[2], dtype=torch.int64)
    for part in values.split(_rows_of_part(values)):
        total += (part.abs() if sizes else part).sum((0, 1), dtype=torch.int32)
    return total


def _rows_of_part(values: Tensor) -> int:
    return max(1, _PART // values[0].numel())


def _take_away(values: Tensor) -> tuple[Tensor, int]:
    """Leave of `values`, codes less 128, int8 [length, others, columns], the difference to what is likely.

    That is a column's mean, and for every second value the sum of its two neighbors times `weight` / 32, both rounded.
    Differences are those modulo 256, from -128 to 127.

    Returns the means, int8 [columns], and the weight.
    """
    means = _column_sums(values).div(values.shape[0] * values.shape[1]).round_().to(torch.int8)
    some = values[::_ROWS_OF_ONE_READ].to(torch.int16)
    # a column that is mostly zero keeps its zeros
    means.masked_fill_(_column_sums(some - means, sizes=True) >= _column_sums(some, sizes=True), 0)
    values.sub_(means)
    seconds, few = values[1::2], slice(None, None, _ROWS_OF_ONE_READ)
    some = _neighbors(values, few).float()  # products and sums are whole numbers, exact in float32 and float64
    fit = (seconds[few] * some).sum(dtype=torch.float64) / some.square().sum(dtype=torch.float64)
    weight = int(fit.mul(_WHOLE).round().clamp(0, _WHOLE - 1).nan_to_num(0))
    for rows, share in _shares(values, weight):
        seconds[rows].sub_(share)
    return means, weight


def _add_up(values: Tensor, means: Tensor, weight: int) -> None:
    """Undo `_take_away`."""
    seconds = values[1::2]
    for rows, share in _shares(values, weight):
        seconds[rows].add_(share)
    values.add_(means)


def _shares(values: Tensor, weight: int) -> Iterator[tuple[slice, Tensor]]:
    """What every second value shares with its two neighbors, int8, part by part."""
    count, step = len(values) // 2, _rows_of_part(values)
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        sums = _neighbors(values, rows)
        yield rows, sums.mul_(weight).add_(_WHOLE // 2).bitwise_right_shift_(_WHOLE_BITS).to(torch.int8)


def _neighbors(values: Tensor, rows: slice) -> Tensor:
    """The sum of the two neighbors of these of every second value, int16; at the end the one there is counts twice."""
    firsts = values[::2]
    sums, after = firsts[: len(values) // 2][rows].to(torch.int16), firsts[1:][rows]
    sums[: len(after)] += after
    sums[len(after) :] *= 2
    return sums


def _signed(codes: Tensor) -> Tensor:
    return codes.bitwise_xor(_ZERO).view(torch.int8)


def _unsigned(values: Tensor) -> Tensor:
    return values.view(torch.uint8).bitwise_xor_(_ZERO)
