"""q's option step: integers of a step that is a share of the block's root mean square, coded by classes of scale.

payload     | T, uint32 | scale of each block, bf16 | entry of each row, uint16 | integers, coded |
            | T, uint32 | scale of each block, bf16 | entry of each row, uint16 | integers, as they are |

T counts all bytes that are sent, as in entropy.py; coding/integers.py says how integers are coded. The second form is
sent if coding saves nothing, and always with code="plain": T is `nbytes` there. Both forms hold the same scales,
entries and integers, so they are decoded to the same values. On a GPU with kernels nobody waits to write or read a
payload; one that is none is decoded as NaN there.

An integer k is decoded as k times the scale of its block, which is step * rms(x) as bf16, rounded up: more only where a
value would need an integer beyond 127, or 32767 with 16 bits. So a few massive values cost the rest of their block
nothing but longer codes, and the error of a block is at most half a step: |x - C(x)| <= step/2 * rms(x) wherever all
values are within reach. Layers that normalize their rows see errors of one size in all rows.

A row whose scale is above 4 times the median of all scales is wide, if at most one row in 16 is, and none of 63 rows.
Pretrained language models keep a few massive values in such rows, as in the first token of a text: steps in its own
unit would lose all its others. So its scale is 1.5 * step * the median of |x|, the lower of two, or what reaches the
largest value by an integer of at most 32767, as bf16, rounded up; and has its sign set. As they are, integers are int8,
or int16 with 16 bits; behind all follow those of wide rows, int16, in room for one row in 16, in order, with zeros
behind them; and at their own places are zeros.

Entries are there with the option codebook=N, in tensors of 2 or 3 dimensions with at least 8 N values. What codebook.py
predicts for a row is taken off before rounding, and comes back: k is decoded as k + p times the scale, where p is the
prediction. So it changes no bound of an error. A wide row has entry 0, which predicts zeros, and so has a row that
would need an integer beyond 127 with another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from thinwire.compress.codebook import Codebook, predicts
from thinwire.compress.codec import CodecError, Key, tensor_bytes
from thinwire.compress.codecs.cast import rounding_bound, saturating_copy
from thinwire.compress.codecs.coding.lengths import LENGTH_BYTES, length_of, put_length, with_length
from thinwire.compress.codecs.fused import steps as kernels
from thinwire.compress.codecs.granularity import Blocks, blocks_per
from thinwire.compress.codecs.grid import SMALLEST_SCALE, bfloat16_above, float32_slack, scales_of_steps
from thinwire.compress.codecs.quantizer import Quantizer
from thinwire.compress.entries import limits_of, units_of

_BF16_BYTES = _ENTRY_BYTES = _WIDE_BYTES = 2
_FEW_ROWS, _ROWS_OF_ONE_WIDE, _WIDEST = 63, 16, 32767
_OF_MEDIAN = 1.5
"""About the root mean square of Gaussian values over the median of their magnitudes."""
_TINY, _INFINITY, _NAN, _MAGNITUDE = 0x0080, 0x7F80, 0x7FC0, 0x7FFF
"""The least normal number of bf16, infinity, NaN, and all bits but the sign."""


@dataclass(frozen=True)
class StepQuantizer(Quantizer):
    """Integers of a step, coded unless `plain`."""

    step: float
    """The distance of two points, in root mean squares of the block."""
    bits: int
    """8 or 16: of an integer that is not coded."""
    blocks: Callable[[Sequence[int]], Blocks]
    """Gives the blocks of a tensor of this shape."""
    rows: bool
    """Whether blocks are rows, of which some may be wide."""
    plain: bool
    """Whether all payloads have the second form."""
    entries: int = 0
    """How many rows predict those of a message."""
    codebook: Codebook | None = None
    """These rows; without, all have entry 0."""

    @property
    def last(self) -> int:
        """The largest integer."""
        return (1 << (self.bits - 1)) - 1

    def nbytes(self, shape: Sequence[int]) -> int:
        """The most bytes of a payload; CodecError if they are more than its length can say."""
        start, most = self._places(shape)
        wide = _WIDE_BYTES * most * self.blocks(shape).inner
        return with_length(start - LENGTH_BYTES + self.bits // 8 * prod(shape) + wide)

    def encode(self, x: Tensor, out: Tensor, key: Key) -> None:
        """Write the length, the scales, the entries, and the integers, coded if that is shorter."""
        blocks, columns, flat = self.blocks(x.shape), blocks_per("channel", x.shape), x.reshape(-1).float()
        start, most = self._places(x.shape)
        if self._is_short(most, x.shape) and kernels.cover(flat, blocks):
            kernels.encode_message(flat, blocks.inner, self.step, self.last, columns, out)
            return
        entries: Tensor | None
        predicting = predicts(self.entries, x.shape)
        if predicting and self.codebook is not None:
            scales = self._scales(flat, blocks)
            entries, integers = self.codebook.predict(blocks.view(flat)[0], scales, self.last)
        else:
            scales, integers = self.integers(flat, blocks)
            entries = torch.zeros(blocks.count, dtype=torch.int64, device=x.device) if predicting else None
        if most:
            scales, integers = self._widened(blocks.view(flat)[0], scales, integers, most)
            if entries is not None:
                entries = entries.masked_fill(scales < 0, 0)
        scales_end = LENGTH_BYTES + _BF16_BYTES * blocks.count
        out[LENGTH_BYTES:scales_end] = tensor_bytes(scales)
        if entries is not None:
            out[scales_end:start] = tensor_bytes(entries.to(torch.int16))
        self._see(entries, scales, integers)
        if not self.plain and kernels.cover_on_gpu(integers):
            from thinwire.compress.codecs.fused import lane_kernels

            self._put_plain(scales, integers, most, out[start:])
            coded, size = lane_kernels.encode(integers, columns, len(out) - start)
            shorter = size < len(coded)
            out[start:] = torch.where(shorter, coded, out[start:])
            put_length(torch.where(shorter, start + size, len(out)), out)
            return
        length = 0 if self.plain else kernels.write_integers(integers, columns, out[start:-1])
        if not length:
            self._put_plain(scales, integers, most, out[start:])
        put_length(start + length if length else len(out), out)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write integers, with what is predicted, times scales into `out`."""
        blocks, columns = self.blocks(out.shape), blocks_per("channel", out.shape)
        values = out.view(-1) if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32).view(-1)
        short = self._is_short(self._places(out.shape)[1], out.shape) and kernels.cover(values, blocks)
        if not (short and kernels.decode_message(payload, blocks.inner, self.bits // 8, columns, values)):
            scales, entries, integers = self.read(payload, out.shape)
            units = scales & _MAGNITUDE
            if entries is not None and self.codebook is not None:
                self.codebook.values(integers, units, entries, values)
            elif kernels.cover(values, blocks):
                kernels.values(integers, units, blocks.inner, values)
            else:
                factors = units_of(units)
                values.copy_((blocks.view(integers) * factors).view(-1)[: len(values)])
            self._see(entries, scales, integers)
        if values.data_ptr() != out.data_ptr():
            saturating_copy(values.view(out.shape), out)

    def read(self, payload: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor | None, Tensor]:
        """The scales, bf16 as int16, the entries, int64 [rows], None without any, and all integers, int16 [n].

        Raises CodecError if these bytes are no payload; on a GPU with kernels all scales are NaN then.
        """
        blocks, (start, most), n = self.blocks(shape), self._places(shape), prod(shape)
        scales_end = LENGTH_BYTES + _BF16_BYTES * blocks.count
        scales, entries = payload[LENGTH_BYTES:scales_end].clone().view(torch.int16), None
        if predicts(self.entries, shape):
            entries = payload[scales_end:start].clone().view(torch.int16).long() & 0xFFFF
            if not payload.is_cpu:  # nobody waits for a GPU, and an index beyond the end would end its process
                entries.clamp_(max=self.entries - 1)
            elif (most_named := int(entries.max())) >= self.entries:
                raise CodecError(f"a payload's entries must be below {self.entries}, got {most_named}")
        if not self.plain and kernels.cover_on_gpu(payload):
            from thinwire.compress.codecs.fused import lane_kernels

            stop = payload[:LENGTH_BYTES].clone().view(torch.int32).long() & 0xFFFFFFFF
            integers, fine = lane_kernels.decode(payload, start, stop, blocks_per("channel", shape))
            plain = stop == len(payload)
            integers = torch.where(plain, self._read_plain(payload[start:], scales, n, most), integers)
            return torch.where(plain | fine, scales, _NAN), entries, integers
        length = len(payload) if self.plain else length_of(payload)
        if length == len(payload):
            return scales, entries, self._read_plain(payload[start:], scales, n, most)
        if length < start:
            raise CodecError(f"a payload's scales and entries need {start} bytes, and {length} are there")
        return scales, entries, kernels.read_integers(payload[start:length], blocks_per("channel", shape))

    def error_bound(self, x: Tensor) -> Tensor:
        """Half a step, more for what is beyond the last integer, and the rounding of the tensor's dtype."""
        blocks = self.blocks(x.shape)
        flat = x.detach().reshape(-1).float()
        scales = self._measured(flat, blocks).float()
        largest = scales * self.last
        error = torch.maximum(scales / 2, blocks.view(flat).abs() - scales * limits_of(scales, self.last))
        error = (error + float32_slack(largest)).clamp(min=self.last * SMALLEST_SCALE)
        return blocks.spread(error + rounding_bound(largest, x.dtype), x.shape)

    def integers(self, flat: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """The scales, bf16 as int16 [count], and the integers, int16 [n], of float32 `flat`."""
        if kernels.cover(flat, blocks):
            return kernels.measure(flat, blocks.count, blocks.inner, self.step, self.last)
        scales = self._scales(flat, blocks)
        units = units_of(scales)
        whole = (blocks.view(flat) / units.masked_fill(units == 0, torch.inf)).round_()
        limits = limits_of(units, self.last)
        integers = whole.clamp_(-limits, limits).nan_to_num_(nan=0.0).to(torch.int16)
        return scales, integers.view(-1)[: len(flat)]

    def _scales(self, flat: Tensor, blocks: Blocks) -> Tensor:
        """The scale of each block of float32 `flat`, bf16 as int16 [count]."""
        if kernels.cover(flat, blocks):
            return kernels.measure(flat, blocks.count, blocks.inner, self.step, self.last)[0]
        if blocks.outer == 1 and not blocks.whole.is_padded and kernels.cover_on_gpu(flat):
            from thinwire.compress.codecs.fused import row_kernels

            return row_kernels.scales(flat.view(blocks.count, -1), self.step, self.last)
        return self._measured(flat, blocks).view(torch.int16).squeeze(1)

    def _measured(self, flat: Tensor, blocks: Blocks) -> Tensor:
        """The scales by torch operations, bf16 [count, 1]."""
        return blocks.whole.measured(flat, partial(scales_of_steps, step=self.step, last=self.last))

    def _places(self, shape: Sequence[int]) -> tuple[int, int]:
        """Where the integers begin, and how many rows may be wide."""
        count = self.blocks(shape).count
        start = LENGTH_BYTES + (_BF16_BYTES + (_ENTRY_BYTES if predicts(self.entries, shape) else 0)) * count
        return start, count // _ROWS_OF_ONE_WIDE if self.rows and count > _FEW_ROWS else 0

    def _is_short(self, most: int, shape: Sequence[int]) -> bool:
        """Whether nothing but scales and coded integers is in a payload, as of all messages of few rows."""
        return not (most or self.plain or predicts(self.entries, shape))

    def _widened(self, rows: Tensor, scales: Tensor, integers: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Scales and integers, with those of wide rows in place of what they are in their own unit."""
        wide = _wide(scales, most)
        if wide.is_cpu and not (most := int(wide.sum())):
            return scales, integers
        first, goes = _first_of(wide, most)
        some = rows[first]
        sizes = some.abs()
        typical = torch.maximum(sizes.median(1).values * (_OF_MEDIAN * self.step), sizes.amax(1) / _WIDEST)
        units = bfloat16_above(typical, SMALLEST_SCALE).view(torch.int16)
        factors = units_of(units)
        limits = limits_of(factors, _WIDEST)
        found = torch.minimum(torch.maximum((some / factors).round_(), -limits), limits)
        found = found.nan_to_num_(nan=0.0).to(torch.int16)
        by_row = integers.view(len(rows), -1)
        by_row[first] = torch.where(goes, found, by_row[first])
        sent = torch.where(goes.squeeze(1), units | ~_MAGNITUDE, scales[first])
        return scales.index_copy(0, first, sent), integers

    def _put_plain(self, scales: Tensor, integers: Tensor, most: int, out: Tensor) -> None:
        """Write integers as they are, and those of wide rows behind all."""
        size = self.bits // 8 * len(integers)
        if most:
            by_row = integers.view(len(scales), -1)
            first, goes = _first_of(scales < 0, most)
            out[size:] = tensor_bytes(torch.where(goes, by_row[first], 0))
            integers = _narrow(scales, integers)
        out[:size] = tensor_bytes(integers.to(torch.int8) if self.bits == 8 else integers)

    def _read_plain(self, coded: Tensor, scales: Tensor, n: int, most: int) -> Tensor:
        """The integers, int16 [n], that `_put_plain` wrote."""
        size = self.bits // 8 * n
        integers = coded[:size].clone().view(torch.int8 if self.bits == 8 else torch.int16).to(torch.int16)
        if most:
            first, goes = _first_of(scales < 0, most)
            wide, by_row = coded[size:].clone().view(torch.int16), integers.view(len(scales), -1)
            by_row[first] = torch.where(goes, wide.view(most, -1), by_row[first])
        return integers

    def _see(self, entries: Tensor | None, scales: Tensor, integers: Tensor) -> None:
        """Show a message to the codebook, without its wide rows."""
        if self.codebook is not None:
            self.codebook.see(entries, _narrow(scales, integers).view(len(scales), -1))


def _narrow(scales: Tensor, integers: Tensor) -> Tensor:
    """The integers, int16 [n], with zeros in place of those of wide rows."""
    wide = scales < 0
    if wide.is_cpu and not wide.any():
        return integers
    return integers.view(len(scales), -1).masked_fill(wide.unsqueeze(1), 0).view(-1)


def _wide(scales: Tensor, most: int) -> Tensor:
    """Which rows are wide, bool [count], given the scales of all, bf16 as int16."""
    known = scales.int().clamp(min=_TINY)
    middle = known.sort().values[(len(known) - 1) // 2]
    # the integers of bf16 are in the order of its numbers, and 2 octaves lie between one and its quarter
    wide = known > middle + (2 << 7)
    return wide & (wide.sum() <= most) & (known.amax() < _INFINITY)


def _first_of(marked: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The indices [most] of rows, the marked ones first, and whether each is one, bool [most, 1]; nobody waits."""
    first = marked.to(torch.uint8).sort(descending=True, stable=True).indices[:most]
    return first, marked[first].unsqueeze(1)
