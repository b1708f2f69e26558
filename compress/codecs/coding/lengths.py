"""Payloads that say how long they are, of codecs with code="entropy": the first four bytes, a uint32, count all."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Self

import torch
from torch import Tensor

from thinwire.compress.codec import Codec, CodecError, require_choice
from thinwire.compress.transfer import put

Code = Literal["entropy", "plain"]
LENGTH_BYTES = 4


class MayVary:
    """A base of codecs with the option `code`. If it is given, a payload says how long it is."""

    code: Code | None

    @property
    def varies(self) -> bool:
        """Whether frequent symbols take fewer bits."""
        return self.code == "entropy"

    def of_known_length(self) -> Self:
        """The codec without `code`: it sends what is coded as it is."""
        return replace(self, code=None)  # type: ignore[type-var]

    def used(self, payload: Tensor) -> int:
        """How many bytes of a payload are sent; CodecError if it says something impossible."""
        return length_of(payload) if self.varies and len(payload) else len(payload)


def check_code(codec: Codec, code: object, allowed: Sequence[Code] = ("entropy",)) -> None:
    """Raise CodecError if a codec's option `code` is not allowed."""
    if code is not None:
        require_choice(codec, "code", code, allowed)


def with_length(size: int) -> int:
    """The size of a payload that says how long it is, given that of the rest; CodecError if no length can say it."""
    nbytes, most = LENGTH_BYTES + size, (1 << 8 * LENGTH_BYTES) - 1
    if nbytes > most:
        raise CodecError(
            f'a payload that says how long it is may have {most} bytes, got {nbytes}; drop code="entropy", or send '
            f"fewer rows at a time"
        )
    return nbytes


def put_length(length: int | Tensor, out: Tensor) -> None:
    """Write how many bytes of a payload are sent, and zeros beyond them; of int64 [1] on a GPU, the zeros are there."""
    if isinstance(length, Tensor):
        out[:LENGTH_BYTES] = length.view(torch.uint8)[:LENGTH_BYTES]
        return
    told = torch.frombuffer(bytearray(length.to_bytes(LENGTH_BYTES, "little")), dtype=torch.uint8)
    out[:LENGTH_BYTES] = put(told, out.device)
    out[length:] = 0


def length_of(payload: Tensor) -> int:
    """How many bytes of a payload are sent; CodecError if it says something impossible."""
    length = int.from_bytes(bytes(payload[:LENGTH_BYTES].tolist()), "little")
    if not LENGTH_BYTES <= length <= len(payload):
        raise CodecError(f"a payload's length must be from {LENGTH_BYTES} to {len(payload)}, got {length}")
    return length
