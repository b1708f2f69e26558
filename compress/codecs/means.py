"""Values in 2 bits: a code for the bin of each, and a table of what the bins decode to. A format of sparse codecs.

payload     | mean of bin 0 | .. | mean of bin 3 | codes |      means are float32, codes are packed as in bits.py

The four bins are 1.5 s wide, where m is the mean of all values of a message and s their standard deviation (dividing by
n - 1): up to m - 1.5 s, up to m, up to m + 1.5 s, and above. A value in bin i is decoded as the mean of all values in
it. So the bins cover m +- 3 s, and the outer ones all beyond, as in 2508.15706.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compress.codec import Codec, Key, require_floating, tensor_bytes
from thinwire.compress.codecs.cast import rounding_bound, saturating_copy
from thinwire.compress.codecs.coding.bits import pack, packed_size, unpack

BITS = 2
BINS = 1 << BITS
TABLE_BYTES = 4 * BINS
_REACH = 3.0
"""Standard deviations from the middle to the end of the outer bins."""


@dataclass(frozen=True, repr=False)
class Means(Codec):
    """Four bins over three standard deviations to both sides, each decoded as its mean: for values only."""

    name: ClassVar[str] = "means(2)"

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The table, and 2 bits for each element; 0 without elements."""
        require_floating(self, dtype)
        return TABLE_BYTES + packed_size(prod(shape), BITS) if prod(shape) else 0

    def error_bound(self, x: Tensor) -> Tensor:
        """How far each element is from the mean of its bin, and half a unit in the last place of its dtype."""
        table, codes = _binned(x)
        decoded = table.index_select(0, codes.long()).double().view(x.shape)
        bound = (decoded - x.double()).abs().float()
        return bound + rounding_bound(bound + x.float().abs(), x.dtype) + rounding_bound(bound, torch.float32)

    def error_bound_within(self, magnitudes: Tensor) -> Tensor:
        """Twice the largest magnitude: a value and the mean of its bin may lie at both ends."""
        if not magnitudes.numel():
            return torch.zeros((), dtype=torch.float32, device=magnitudes.device)
        return 2.001 * magnitudes.detach().float().abs().max()

    def _encode(self, x: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        table, codes = _binned(x)
        out[:TABLE_BYTES] = tensor_bytes(table)
        pack(codes, BITS, out[TABLE_BYTES:])

    def _decode(self, payload: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        # a copy, because a payload may begin at any byte
        table = payload[:TABLE_BYTES].clone().view(torch.float32)
        values = table.index_select(0, unpack(payload[TABLE_BYTES:], BITS, out.numel()).long())
        saturating_copy(values.view(out.shape), out)


def _binned(x: Tensor) -> tuple[Tensor, Tensor]:
    """The means of the bins, float32 [4], 0 for an empty one; and the bin of each element, uint8 [n]."""
    values = x.detach().reshape(-1).double()
    middle = values.mean()
    spread = (values - middle).square().sum().div(max(1, len(values) - 1)).sqrt()
    width = 2 * _REACH / BINS * spread
    bins = ((values - middle) / width).floor().nan_to_num(nan=0.0) + BINS // 2  # no spread: 0 / 0
    codes = bins.clamp(0, BINS - 1).to(torch.uint8)
    sums = torch.zeros(BINS, dtype=torch.float64, device=x.device).index_add_(0, codes.long(), values)
    counts = torch.bincount(codes, minlength=BINS)
    return (sums / counts.clamp(min=1)).float(), codes
