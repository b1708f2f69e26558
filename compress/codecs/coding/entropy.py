"""The option code="entropy": codes that occur often take fewer bits, so a payload may be shorter than `nbytes`.

payload     | T, uint32 | all of the payload without this option, but its codes | form, uint8 | codes |

T counts all bytes that are sent. The sender fills the rest, up to `nbytes`, with zeros; the receiver ignores it. In
form 0 codes less 2**(bits-1) are integers, coded by classes of scale as in integers.py: for differences and gradients,
whose columns and rows vary in size. In form 1 they are coded by how frequent each is, as in symbols.py: for codes of
any shape, as after a ReLU. The sender takes the shorter one. If neither is shorter than the codes, these are packed as
without this option, with no form before them, and T is `nbytes`. A GPU's codes are coded on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from thinwire.compress.codec import CodecError, Key
from thinwire.compress.codecs.coding.bits import pack, packed_size, unpack
from thinwire.compress.codecs.coding.lengths import LENGTH_BYTES, length_of, put_length, with_length
from thinwire.compress.codecs.coding.symbols import coded_size, decode_symbols, encode_symbols
from thinwire.compress.codecs.fused.steps import read_integers, write_integers
from thinwire.compress.codecs.granularity import blocks_per
from thinwire.compress.codecs.quantizer import Quantizer

_CLASSES, _TABLE = 0, 1
"""The forms."""


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
        head, packed = self._split(plain, x.shape)
        codes = unpack(packed.cpu(), self.bits, x.numel())
        counts = codes.bincount()
        room = torch.empty(min(len(packed) - 1, coded_size(counts)), dtype=torch.uint8)
        length = write_integers(codes.to(torch.int16).sub_(self._zero), blocks_per("channel", x.shape), room)
        form, coded = (_CLASSES, room[:length]) if length else (_TABLE, encode_symbols(codes, counts))
        out[LENGTH_BYTES:] = plain
        if 1 + len(coded) >= len(packed):
            put_length(len(out), out)
            return
        start = LENGTH_BYTES + len(head)
        stop = start + 1 + len(coded)
        out[start], out[start + 1 : stop] = form, coded
        put_length(stop, out)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the inner quantizer's decoded tensor into `out`."""
        self.inner.decode(self.plain(payload, out.shape), out)

    def plain(self, payload: Tensor, shape: Sequence[int]) -> Tensor:
        """The inner payload of a tensor of `shape`; CodecError if these bytes are no payload."""
        length, plain = length_of(payload), payload[LENGTH_BYTES:].clone()
        if length < len(payload):
            head, packed = self._split(plain, shape)
            found = self._read(payload[LENGTH_BYTES + len(head) : length].cpu(), shape)
            least, most = int(found.min()), int(found.max())
            if least < 0 or most >> self.bits:
                raise CodecError(f"a payload's codes must have {self.bits} bits, got codes from {least} to {most}")
            pack(found.to(torch.uint8).to(packed.device), self.bits, packed)
        return plain

    def error_bound(self, x: Tensor) -> Tensor:
        """The inner quantizer's bound: coding loses nothing."""
        return self.inner.error_bound(x)

    @property
    def _zero(self) -> int:
        """The code whose integer is 0."""
        return 1 << (self.bits - 1)

    def _read(self, coded: Tensor, shape: Sequence[int]) -> Tensor:
        """The codes of either form, int16 or uint8 [n]."""
        form = int(coded[0]) if len(coded) else -1
        if form == _CLASSES:
            return read_integers(coded[1:], blocks_per("channel", shape)) + self._zero
        if form != _TABLE:
            raise CodecError(f"a payload's form must be {_CLASSES} or {_TABLE}, got {form}")
        codes, rest = decode_symbols(coded[1:], prod(shape))
        if len(rest):
            raise CodecError(f"a payload must end with its coded symbols, and {len(rest)} bytes more are there")
        return codes

    def _split(self, plain: Tensor, shape: Sequence[int]) -> Sequence[Tensor]:
        """The inner payload without its codes, and the packed codes."""
        return plain.tensor_split([len(plain) - packed_size(prod(shape), self.bits)])
