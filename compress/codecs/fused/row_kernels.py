"""Rows and the entries that predict them on a GPU, by Triton kernels: a program is a row. Imported only where used.

Each step rounds as in entries.py. So `div_rn` divides: the operator / of Triton is not exact.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.compress.codecs.fused.trial import on
from thinwire.compress.entries import EXTRA, UNIT

_PART = 1024
"""Values of a row at a time."""
_SHARE, _EXTRA = map(tl.constexpr, (1 / UNIT, EXTRA))
_LARGEST, _TIES_TO_EVEN = map(tl.constexpr, (3.4028234663852886e38, 12582912.0))
_LARGEST_BFLOAT16 = tl.constexpr(torch.finfo(torch.bfloat16).max)
_INFINITY, _NAN, _SMALLEST = map(tl.constexpr, (0x7F80, 0x7FC00000, 0x0100))


def unpredicted(rows: Tensor, scales: Tensor, table: Tensor, last: int, entries: Tensor) -> Tensor:
    """The integers, int16 [R * width], that entries leave of rows; an entry that needs too large ones becomes 0."""
    integers = torch.empty(rows.numel(), dtype=torch.int16, device=rows.device)
    with on(rows.device):
        _unpredicted[(len(rows),)](rows, scales, table, last, entries, integers, rows.shape[1], _PART)
    return integers


def values(integers: Tensor, scales: Tensor, table: Tensor, entries: Tensor, out: Tensor) -> None:
    """Write integers, with what entries predict, times scales into float32 `out` [R * width]."""
    with on(out.device):
        _values[(len(entries),)](integers, scales, table, entries, out, table.shape[1] - EXTRA, _PART)


def scales(rows: Tensor, step: float, last: int) -> Tensor:
    """The scale of each of float32 `rows`, bf16 as int16 [R]: scales_of_steps of grid.py."""
    found = torch.empty(len(rows), dtype=torch.int16, device=rows.device)
    with on(rows.device):
        _scales[(len(rows),)](rows, found, step, last, rows.shape[1], _PART)
    return found


@triton.jit(do_not_specialize=["step", "last"])
def _scales(rows, scales, step, last, width, PART: tl.constexpr):
    row, squares, most = tl.program_id(0).to(tl.int64), tl.zeros((PART,), tl.float64), tl.zeros((PART,), tl.float32)
    for first in range(0, width, PART):
        at = first + tl.arange(0, PART)
        value = tl.load(rows + row * width + at, mask=at < width, other=0.0)
        squares += value.to(tl.float64) * value.to(tl.float64)
        most = tl.maximum(most, tl.abs(value))
    total = tl.sum(squares, axis=0)
    wide = tl.minimum(tl.sqrt(total / width).to(tl.float32) * step, _LARGEST_BFLOAT16)
    scale = tl.maximum(tl.div_rn(tl.max(most, axis=0), last.to(tl.float32)), wide)
    # a sum of squares is NaN only where a value is
    scale = tl.where(total == total, scale, float("nan"))
    bits = (tl.minimum(scale.to(tl.int32, bitcast=True) & 0x7FFFFFFF, _NAN) + 0xFFFF) >> 16
    tl.store(scales + row, tl.where(bits < _SMALLEST, 0, bits).to(tl.int16))


@triton.jit
def _unit(scales, row):
    """The unit of a row, and whether the row has one."""
    scale = tl.load(scales + row).to(tl.int32)
    return (scale << 16).to(tl.float32, bitcast=True), (scale > 0) & (scale < _INFINITY)


@triton.jit
def _left(rows, table, entry, row, at, width, unit, limit):
    """What an entry leaves of values of a row, in integers."""
    inside = at < width
    over = tl.div_rn(tl.load(rows + row * width + at, mask=inside, other=0.0), unit)
    predicted = tl.load(table + entry * (width + _EXTRA) + at, mask=inside, other=0.0) * _SHARE
    return tl.minimum(tl.maximum(over, -limit), limit) - predicted


@triton.jit
def _unpredicted(rows, scales, table, last, entries, integers, width, PART: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    unit, usable = _unit(scales, row)
    # a row without a unit is 0 throughout
    unit = tl.where(usable, unit, 1.0)
    limit = tl.where(usable, tl.minimum(tl.floor(tl.div_rn(_LARGEST, unit)), last.to(tl.float32)), 0.0)
    entry, most = tl.load(entries + row), 0.0
    for first in range(0, width, PART):
        left = _left(rows, table, entry, row, first + tl.arange(0, PART), width, unit, limit)
        most = tl.maximum(most, tl.max(tl.abs(left), axis=0))
    entry = tl.where(usable & (most <= last), entry, 0)
    tl.store(entries + row, entry)
    for first in range(0, width, PART):
        at = first + tl.arange(0, PART)
        left = _left(rows, table, entry, row, at, width, unit, limit)
        whole = (left + _TIES_TO_EVEN) - _TIES_TO_EVEN
        tl.store(integers + row * width + at, whole.to(tl.int16), mask=at < width)


@triton.jit
def _values(integers, scales, table, entries, out, width, PART: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    (unit, _), entry = _unit(scales, row), tl.load(entries + row)
    for first in range(0, width, PART):
        at = first + tl.arange(0, PART)
        whole = tl.load(integers + row * width + at, mask=at < width, other=0).to(tl.float32)
        predicted = tl.load(table + entry * (width + _EXTRA) + at, mask=at < width, other=0.0) * _SHARE
        value = (whole + predicted) * unit
        value = tl.where(value > _LARGEST, _LARGEST, value)  # NaN stays
        tl.store(out + row * width + at, tl.where(value < -_LARGEST, -_LARGEST, value), mask=at < width)
