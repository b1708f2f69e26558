"""q's option step: integers of a step that is a share of the block's root mean square, coded by classes of scale.

payload     | T, uint32 | scale of each block, bf16 | rows apart, bf16 | integers, coded as coding/integers.py says |
            | T, uint32 | scale of each block, bf16 | room for rows apart, bf16 | integers, int8 or int16 |

T counts all bytes that are sent, as in entropy.py. The second form is sent if coding saves nothing, and always with
code="plain": T is `nbytes` there, because the room is that of the most rows that go apart, one in 64 (none of 63 rows).
The rows apart lie at its begin, in order, and zeros behind them. Both forms hold the same scales, rows and integers, so
they are decoded to the same values. On a GPU nobody looks at a payload of code="plain" to write or read it.

An integer k is decoded as k
times the scale of its block, which is step * rms(x) as bf16, rounded up: more only where a value would need an integer
beyond 127, or 32767 with 16 bits. So a few massive values cost the rest of their block nothing but longer codes, and
the error of a block is at most half a step: |x - C(x)| <= step/2 * rms(x) wherever all values are within reach. Layers
that normalize their rows see errors of one size in all rows.

A row whose scale is above 16 times the median of all scales goes apart, in bf16, if at most one row in 64 does. Its
scale is 0 in the payload, and its integers are 0. Such a row is mostly the first token of a text, in which pretrained
language models keep a few values of thousands: steps in its own unit would lose all its others. Any other scale of 0 is
sent as the least normal number of bf16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from thinwire.compress.codec import CodecError, Key, tensor_bytes
from thinwire.compress.codecs.cast import rounding_bound, saturating_copy
from thinwire.compress.codecs.coding.integers import decode_integers, encode_integers
from thinwire.compress.codecs.coding.lengths import LENGTH_BYTES, length_of, put_length, with_length
from thinwire.compress.codecs.fused import steps as kernels
from thinwire.compress.codecs.granularity import Blocks
from thinwire.compress.codecs.grid import bfloat16_above, float32_slack, largest_magnitude
from thinwire.compress.codecs.quantizer import Quantizer

SMALLEST_SCALE = 2.0**-125
"""Scales below it are 0: no product of a scale and an integer may be a denormal number."""
_OVER_BLOCK = (0, 2)
_BF16_BYTES = 2
_MASSIVE, _ROWS_OF_ONE_APART = 16, 64
_TINY, _INFINITY = 0x0080, 0x7F80
"""The least normal number of bf16, and infinity."""


@dataclass(frozen=True)
class StepQuantizer(Quantizer):
    """Integers of a step, coded unless `plain`."""

    step: float
    """The distance of two points, in root mean squares of the block."""
    bits: int
    """8 or 16: of an integer that is not coded."""
    blocks: Callable[[Sequence[int]], Blocks]
    """Gives the blocks of a tensor of this shape."""
    columns: Callable[[Sequence[int]], Blocks]
    """Gives the columns of a tensor of this shape, as blocks."""
    rows: bool
    """Whether blocks are rows, of which some may go apart."""
    plain: bool
    """Whether all payloads have the second form."""

    @property
    def last(self) -> int:
        """The largest integer."""
        return (1 << (self.bits - 1)) - 1

    def nbytes(self, shape: Sequence[int]) -> int:
        """The most bytes of a payload; CodecError if they are more than its length can say."""
        head, room = self._places(shape)
        return with_length(head + room - LENGTH_BYTES + self.bits // 8 * prod(shape))

    def encode(self, x: Tensor, out: Tensor, key: Key) -> None:
        """Write the length, the scales, the rows apart, and the integers, coded if that is shorter."""
        blocks, columns, flat = self.blocks(x.shape), self.columns(x.shape), x.reshape(-1).float()
        scales, integers = self.integers(flat, blocks)
        head, room = self._places(x.shape)
        if self.rows:
            scales = torch.where(scales == 0, _TINY, scales)
        rows, apart = x.new_empty(0, dtype=torch.bfloat16), 0
        if room:
            massive = _massive(scales)
            first, goes = _first_of(massive, room // (_BF16_BYTES * blocks.inner))
            rows = torch.where(goes, x.reshape(blocks.count, -1)[first].bfloat16(), 0)
            by_row = integers.view(blocks.count, -1)
            by_row[first] = torch.where(goes, 0, by_row[first])
            scales = scales.masked_fill(massive, 0)
            apart = 0 if self.plain else int(goes.sum())
        start, length = head + _BF16_BYTES * apart * blocks.inner, 0
        if not self.plain:
            length = self._write(integers, columns, out[start:-1])
        if length:
            out[head:start] = tensor_bytes(rows[:apart])
        else:
            out[head : head + room] = tensor_bytes(rows)
            out[head + room :] = tensor_bytes(integers.to(torch.int8) if self.bits == 8 else integers)
        out[LENGTH_BYTES:head] = tensor_bytes(scales)
        put_length(start + length if length else len(out), out)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write integers times scales into `out`, and the rows apart."""
        blocks = self.blocks(out.shape)
        scales, rows, integers = self.read(payload, out.shape)
        values = out.view(-1) if out.dtype == torch.float32 else torch.empty(out.numel(), device=out.device)
        if kernels.cover(values, blocks):
            kernels.values(integers, scales, blocks.inner, values)
        else:
            factors = (scales.int() << 16).view(torch.float32).unsqueeze(1)
            values.copy_((blocks.view(integers).float() * factors).view(-1)[: len(values)])
        if values.data_ptr() != out.data_ptr():
            saturating_copy(values.view(out.shape), out)
        if len(rows):
            first, goes = _first_of(scales == 0, len(rows))
            decoded, by_row = torch.empty_like(rows, dtype=out.dtype), out.view(blocks.count, -1)
            saturating_copy(rows, decoded)
            by_row[first] = torch.where(goes, decoded, by_row[first])

    def read(self, payload: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """The scales, int16, the rows apart, or all of their room, bf16, and all integers, int16 [n].

        Raises CodecError if these bytes are no payload.
        """
        blocks, (head, room) = self.blocks(shape), self._places(shape)
        scales = payload[LENGTH_BYTES:head].clone().view(torch.int16)
        length = len(payload) if self.plain else length_of(payload)
        if length == len(payload):
            rows = payload[head : head + room].clone().view(torch.bfloat16).view(-1, blocks.inner)
            plain = payload[head + room :].clone().view(torch.int8 if self.bits == 8 else torch.int16)
            return scales, rows, plain.to(torch.int16)
        apart = int((scales == 0).sum()) if self.rows else 0
        start = head + _BF16_BYTES * apart * blocks.inner
        if length < start:
            raise CodecError(f"a payload's rows apart need {start - head} bytes, and {length - head} are there")
        rows = payload[head:start].clone().view(torch.bfloat16).view(apart, blocks.inner)
        n, coded, columns = prod(shape), payload[start:length].cpu(), self.columns(shape)
        integers = torch.empty(n, dtype=torch.int16)
        if not (kernels.cover_code(coded) and kernels.decode(coded, columns, integers)):
            integers = decode_integers(coded, columns)  # says what is wrong
        return scales, rows, integers.to(payload.device)

    def error_bound(self, x: Tensor) -> Tensor:
        """Half a step, more for what is beyond the last integer, and the rounding of the tensor's dtype."""
        blocks = self.blocks(x.shape)
        flat = x.detach().reshape(-1).float()
        scales = blocks.whole.measured(flat, self._measure).float()
        largest = scales * self.last
        error = torch.maximum(scales / 2, blocks.view(flat).abs() - scales * self._limits(scales))
        error = (error + float32_slack(largest)).clamp(min=self.last * SMALLEST_SCALE)
        return blocks.spread(error + rounding_bound(largest, x.dtype), x.shape)

    def integers(self, flat: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """The scales, bf16 as int16 [count], and the integers, int16 [n], of float32 `flat`."""
        if kernels.cover(flat, blocks):
            return kernels.measure(flat, blocks.count, blocks.inner, self.step, self.last)
        scales = blocks.whole.measured(flat, self._measure)
        units = scales.float()
        whole = (blocks.view(flat) / units.masked_fill(units == 0, torch.inf)).round_().nan_to_num_(nan=0.0)
        limits = self._limits(units)
        integers = torch.minimum(torch.maximum(whole, -limits), limits).nan_to_num_(nan=0.0).to(torch.int16)
        return scales.view(torch.int16).squeeze(1), integers.view(-1)[: len(flat)]

    def _measure(self, values: Tensor) -> Tensor:
        """The scale of each block of `values` [outer, count, inner]: bf16 [count, 1]."""
        # float64: the order of its sums, which machines differ in, does not reach the bf16 of a scale
        norms: Tensor = torch.linalg.vector_norm(values, dim=_OVER_BLOCK, dtype=torch.float64)
        wide = (norms / math.sqrt(values.shape[0] * values.shape[2])).float().unsqueeze(1) * self.step
        reaching = largest_magnitude(values) / torch.full((1,), self.last, dtype=torch.float32, device=values.device)
        wide = wide.clamp(max=torch.finfo(torch.bfloat16).max)
        return bfloat16_above(torch.maximum(reaching, wide), SMALLEST_SCALE)

    def _limits(self, scales: Tensor) -> Tensor:
        """The largest integer of each block whose value float32 has."""
        most = torch.full((1,), torch.finfo(torch.float32).max, device=scales.device)
        return (most / scales).floor_().clamp_(max=self.last)

    def _places(self, shape: Sequence[int]) -> tuple[int, int]:
        """Where the rows apart begin, and the bytes of their room."""
        blocks = self.blocks(shape)
        most = blocks.count // _ROWS_OF_ONE_APART if self.rows else 0
        return LENGTH_BYTES + _BF16_BYTES * blocks.count, _BF16_BYTES * most * blocks.inner

    def _write(self, integers: Tensor, columns: Blocks, out: Tensor) -> int:
        """Write the code of `integers`, and return its length; 0 if there is no room.

        It is made on the host: the torch operations on a GPU are thousands of small kernels for any message.
        """
        integers, room = integers.cpu(), out if out.device.type == "cpu" else torch.empty(len(out), dtype=torch.uint8)
        if kernels.cover_code(integers):
            length = kernels.encode(integers, columns, room)
        else:
            parts = encode_integers(integers, columns)
            length = sum(map(len, parts))
            if length > len(room):
                return 0
            torch.cat(parts, out=room[:length])
        if room is not out:
            out[:length] = room[:length]
        return length


def _massive(scales: Tensor) -> Tensor:
    """Which rows go apart, bool [count], given the scales of all, bf16 as int16."""
    known, most = scales.int(), len(scales) // _ROWS_OF_ONE_APART
    middle = known.sort().values[(len(known) - 1) // 2]
    # the integers of bf16 are in the order of its numbers, and 4 octaves lie between one and its 16th
    apart = known > middle + (4 << 7)
    return apart & (apart.sum() <= most) & (known.amax() <= _INFINITY)


def _first_of(marked: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The indices [most] of rows, the marked ones first, and whether each is one, bool [most, 1]; nobody waits."""
    first = marked.to(torch.uint8).sort(descending=True, stable=True).indices[:most]
    return first, marked[first].unsqueeze(1)
