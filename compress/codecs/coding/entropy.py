"""The option code="entropy": codes that occur often take fewer bits, so a payload may be shorter than `nbytes`.

payload     | T, uint32 | all of the payload without this option, but its codes | the codes, coded |

T counts all bytes that are sent. The sender fills the rest, up to `nbytes`, with zeros; the receiver ignores it. If
coding makes the codes no shorter, they are packed as without this option, and T is `nbytes`.

Symbols are bytes: as many codes as fill one, 1, 2 or 4 bits each; two of 3 bits; else one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from thinwire.compress.codec import Key
from thinwire.compress.codecs.coding.bits import pack, packed_size, unpack
from thinwire.compress.codecs.coding.huffman import huffman, unhuffman_exactly
from thinwire.compress.codecs.coding.lengths import LENGTH_BYTES, length_of, put_length, with_length
from thinwire.compress.codecs.quantizer import Quantizer

_PAIRED = 3
"""The width of codes that are coded two by two."""


@dataclass(frozen=True)
class Coded(Quantizer):
    """A quantizer whose codes, at the end of its payload, are coded by how often they occur."""

    inner: Quantizer
    bits: int
    """Bits of a code."""

    def nbytes(self, shape: Sequence[int]) -> int:
        """The most bytes of a payload; CodecError if they are more than its length can say."""
        return with_length(self.inner.nbytes(shape))

    def encode(self, x: Tensor, out: Tensor, key: Key) -> None:
        """Write the length, then the inner payload, with its codes coded if that is shorter."""
        plain = torch.empty(len(out) - LENGTH_BYTES, dtype=torch.uint8, device=x.device)
        self.inner.encode(x, plain, key)
        head, codes = self._split(plain, x.shape)
        coded = [head, huffman(_symbols(codes.cpu(), self.bits, x.numel()))]
        start = LENGTH_BYTES
        for part in coded if sum(map(len, coded)) < len(plain) else [plain]:
            out[start : start + len(part)] = part
            start += len(part)
        put_length(start, out)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the inner quantizer's decoded tensor into `out`."""
        self.inner.decode(self.plain(payload, out.shape), out)

    def plain(self, payload: Tensor, shape: Sequence[int]) -> Tensor:
        """The inner payload of a tensor of `shape`; CodecError if these bytes are no payload."""
        length, plain = length_of(payload), payload[LENGTH_BYTES:]
        if length == len(payload):
            return plain
        head, _ = self._split(plain, shape)
        codes = _codes(payload[LENGTH_BYTES + len(head) : length].cpu(), self.bits, prod(shape))
        return torch.cat([head, codes.to(head.device)])

    def error_bound(self, x: Tensor) -> Tensor:
        """The inner quantizer's bound: coding loses nothing."""
        return self.inner.error_bound(x)

    def _split(self, plain: Tensor, shape: Sequence[int]) -> Sequence[Tensor]:
        """The inner payload without its codes, and the packed codes."""
        return plain.tensor_split([len(plain) - packed_size(prod(shape), self.bits)])


def _symbols(packed: Tensor, bits: int, n: int) -> Tensor:
    """The symbols of `n` packed codes: uint8."""
    if 8 % bits == 0:
        return packed
    codes = unpack(packed, bits, n)
    if bits != _PAIRED:
        return codes
    codes = torch.nn.functional.pad(codes, (0, n % 2))
    return codes[::2] | codes[1::2] << _PAIRED


def _codes(coded: Tensor, bits: int, n: int) -> Tensor:
    """The packed codes whose symbols these bytes code."""
    if 8 % bits == 0:
        return unhuffman_exactly(coded, packed_size(n, bits))
    if bits == _PAIRED:
        pairs = unhuffman_exactly(coded, (n + 1) // 2)
        codes = torch.stack([pairs, pairs >> _PAIRED], 1).view(-1)[:n]
    else:
        codes = unhuffman_exactly(coded, n)
    packed = torch.empty(packed_size(n, bits), dtype=torch.uint8)
    # Masked: bits beyond a code's own would change its neighbours.
    pack(codes.bitwise_and((1 << bits) - 1), bits, packed)
    return packed
