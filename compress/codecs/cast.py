"""The codecs that only change the number format: none, fp16 and bf16.

none, fp16, bf16                | element 0 | element 1 | ..
with code="entropy"             | T, uint32 | the low bytes of each element | high byte of each element, Huffman-coded |

The high byte has the sign and most of the exponent, and few of its values are frequent; the other bytes look random. T
counts all bytes that are sent. If coding makes the high bytes no shorter, they are sent as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compress.codec import Codec, Key, require_floating, tensor_bytes
from thinwire.compress.codecs.coding.huffman import huffman, unhuffman_exactly
from thinwire.compress.codecs.coding.lengths import (
    LENGTH_BYTES,
    Code,
    MayVary,
    check_code,
    length_of,
    put_length,
    with_length,
)


@dataclass(frozen=True, repr=False)
class HighBytes(MayVary, Codec):
    """A codec that sends elements; with the option `code` it codes their high bytes."""

    code: Code | None = field(default=None, kw_only=True)
    """`entropy`: frequent high bytes take fewer bits, so a payload may be shorter than `nbytes`."""

    def __post_init__(self) -> None:
        check_code(self, self.code)

    def size(self, n: int, width: int) -> int:
        """Bytes of `n` elements of `width` bytes; with `code` that is the most, and there are four bytes more."""
        return with_length(n * width) if self.varies and n else n * width

    def write(self, elements: Tensor, width: int, out: Tensor) -> None:
        """Write the bytes of all elements, of `width` bytes each, into a payload."""
        if not self.varies:
            out.copy_(elements)
            return
        by_element = elements.view(-1, width)
        n, high = len(by_element), by_element[:, -1].contiguous()
        coded = huffman(high.cpu())
        tail = coded if len(coded) < n else high
        start = LENGTH_BYTES + n * (width - 1)
        out[LENGTH_BYTES:start].view(n, width - 1).copy_(by_element[:, :-1])
        out[start : start + len(tail)] = tail
        put_length(start + len(tail), out)

    def read(self, payload: Tensor, width: int, elements: Tensor) -> None:
        """Read the bytes of all elements, of `width` bytes each, from a payload."""
        if not self.varies:
            elements.copy_(payload)
            return
        by_element, length = elements.view(-1, width), length_of(payload)
        n = len(by_element)
        start = LENGTH_BYTES + n * (width - 1)
        tail = payload[start:length]
        by_element[:, :-1] = payload[LENGTH_BYTES:start].view(n, width - 1)
        by_element[:, -1] = tail if length == len(payload) else unhuffman_exactly(tail.cpu(), n).to(elements.device)


@dataclass(frozen=True, repr=False)
class Uncompressed(HighBytes):
    """`none`: the tensor's own bytes, of any dtype, in row-major order."""

    name: ClassVar[str] = "none"

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The size of the tensor itself; with `code` that is the most, and there are four bytes more."""
        return self.size(prod(shape), dtype.itemsize)

    def error_bound(self, x: Tensor) -> Tensor:
        """0: nothing is lost."""
        return torch.zeros((), dtype=torch.float32, device=x.device)

    def _encode(self, x: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        self.write(tensor_bytes(x), x.element_size(), out)

    def _decode(self, payload: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        self.read(payload, out.element_size(), tensor_bytes(out))


@dataclass(frozen=True, repr=False)
class Cast(HighBytes):
    """A floating-point tensor sent in another floating-point format, rounded to nearest, ties to even."""

    wire: ClassVar[torch.dtype]
    """The format on the wire."""

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """One wire element for each element; with `code` that is the most, and there are four bytes more."""
        require_floating(self, dtype)
        return self.size(prod(shape), self.wire.itemsize)

    def error_bound(self, x: Tensor) -> Tensor:
        """Half a unit in the last place of the wire format and of the tensor's dtype, and what saturation cuts off.

        Infinity where bf16 may be.
        """
        magnitude = x.detach().float().abs()
        excess = (magnitude - torch.finfo(self.wire).max).clamp(min=0)
        bound = excess + rounding_bound(magnitude, self.wire) + rounding_bound(magnitude, x.dtype)
        return infinite_beyond(bound, magnitude, self.wire)

    def _encode(self, x: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        sent = torch.empty(x.shape, dtype=self.wire, device=x.device)
        saturating_copy(x, sent)
        self.write(tensor_bytes(sent), self.wire.itemsize, out)

    def _decode(self, payload: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        sent = torch.empty(out.shape, dtype=self.wire, device=out.device)
        self.read(payload, self.wire.itemsize, tensor_bytes(sent))
        saturating_copy(sent, out)


@dataclass(frozen=True, repr=False)
class Float16(Cast):
    """`fp16`: IEEE half precision; values beyond its range become +-65504, infinity NaN."""

    name: ClassVar[str] = "fp16"
    wire: ClassVar[torch.dtype] = torch.float16


@dataclass(frozen=True, repr=False)
class BFloat16(Cast):
    """`bf16`: the upper half of a float32; it has float32's range, so only values above 3.39e38 become infinite."""

    name: ClassVar[str] = "bf16"
    wire: ClassVar[torch.dtype] = torch.bfloat16


def saturating_copy(source: Tensor, out: Tensor) -> None:
    """Copy `source` to `out`; if `out` is fp16, values beyond its range become +-65504, and infinity NaN."""
    if out.dtype == torch.float16 and source.dtype != torch.float16:
        limit = torch.finfo(torch.float16).max
        source = source.to(torch.promote_types(source.dtype, torch.float32))  # bf16 has no 65504
        # x - x is 0, but NaN for an infinity, which clamping would hide.
        source = source.clamp(-limit, limit).add_(source - source)
    out.copy_(source)


def rounding_bound(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest error of rounding to `dtype`, for finite values of at most `magnitude` that are in its range."""
    info = torch.finfo(dtype)
    return (magnitude + info.tiny) * (info.eps / 2)


def infinite_beyond(bound: Tensor, magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """`bound`, but infinity where a value of `magnitude`, decoded with an error within it, may overflow `dtype`.

    fp16 never does: values beyond its range are cut to it.
    """
    limit = min(torch.finfo(torch.float32).max, torch.finfo(dtype).max)
    return bound if dtype == torch.float16 else bound.masked_fill(magnitude + bound > limit, torch.inf)
