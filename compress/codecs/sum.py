"""Sums of codecs, written `lowrank(16) + q(1)`: each codec sends what those before it have lost.

payload     | payload of the first codec | payload of the second | ..
            | T, uint32 | the same, of each the bytes that are sent |          if one of them varies

The first codec gets the tensor, the others differences in float32. The decoded tensor is the sum of what they decode,
added up in float32 from the first to the last, and then rounded to the tensor's dtype. What a lowrank loses is worked
out in float32, a part at a time, so it may differ from the decoded tensor in the last bits; the next codec sends it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compress.codec import Codec, CodecError, Key, call_method, require_floating, size_of
from thinwire.compress.codecs.blockwise import Blockwise
from thinwire.compress.codecs.cast import Uncompressed, infinite_beyond, rounding_bound, saturating_copy
from thinwire.compress.codecs.coding.lengths import LENGTH_BYTES, length_of, put_length, with_length
from thinwire.compress.codecs.lowrank import LowRank
from thinwire.compress.codecs.quantizer import Make
from thinwire.compress.codecs.ramp import MOST_VARIANTS
from thinwire.compress.progress import Progress


@dataclass(frozen=True, repr=False)
class Sum(Codec):
    """`first + second + ..`: the second codec sends what the first one has lost, and so on.

    Each codec draws random numbers of its own. All but the last are used without the scaling that makes them unbiased.
    """

    name: ClassVar[str] = "sum"

    terms: tuple[Codec, ...]
    """The codecs, in order."""

    def __post_init__(self) -> None:
        flat = [part for term in self.terms for part in (term.terms if isinstance(term, Sum) else (term,))]
        CodecError.require(
            (len(flat) > 1, f"a sum must have at least two codecs, got {self}"),
            *((not (term.reuses_indices), f"{term} cannot be part of a sum, got {self}") for term in flat),
            *(
                (not isinstance(term, Uncompressed), f"none loses nothing, so write none alone, not {self}")
                for term in flat
            ),
            (
                prod(len(term.variants) for term in flat) <= MOST_VARIANTS,
                f"a sum may become up to {MOST_VARIANTS} sums while its codecs change, got {self}",
            ),
            (sum(term.warm_starts for term in flat) < 2, f"only one codec of a sum may be a lowrank, got {self}"),
        )
        object.__setattr__(self, "terms", tuple(flat))

    def __str__(self) -> str:
        return " + ".join(map(str, self.terms))

    __repr__ = __str__

    def check_channel(self, channel: str) -> None:
        """Raise CodecError if one of the codecs cannot be used on this channel."""
        for term in self.terms:
            term.check_channel(channel)

    @property
    def _coders(self) -> tuple[Codec, ...]:
        """The codecs as they are used."""
        *others, last = self.terms
        return (*(term.unscaled() for term in others), last)

    @property
    def warm_starts(self) -> bool:
        """Whether one of the codecs starts from its last message."""
        return any(term.warm_starts for term in self.terms)

    @property
    def varies(self) -> bool:
        """Whether the payload of one of the codecs may be shorter than its `nbytes`."""
        return any(term.varies for term in self.terms)

    def used(self, payload: Tensor) -> int:
        """How many bytes of a payload are sent; CodecError if it says something impossible."""
        return length_of(payload) if self.varies and len(payload) else len(payload)

    def unscaled(self) -> "Sum":
        """The sum without the scaling that makes its last codec unbiased."""
        return Sum((*self.terms[:-1], self.terms[-1].unscaled()))

    def at(self, progress: Progress | None) -> "Sum":
        """The sum of the codecs at a point in training."""
        terms = tuple(term.at(progress) for term in self.terms)
        return self if terms == self.terms else Sum(terms)

    @property
    def variants(self) -> tuple[Codec, ...]:
        """Every sum that it may become."""
        return tuple(Sum(terms) for terms in product(*(term.variants for term in self.terms)))

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The size of all payloads; if one varies the most, and four bytes more."""
        require_floating(self, dtype)
        nbytes = sum(self._sizes(shape, dtype))
        return with_length(nbytes) if self.varies and nbytes else nbytes

    def error_bound(self, x: Tensor) -> Tensor:
        """The largest error of the last codec, given the largest errors of those before it."""
        return self._bound(x.detach().float().abs(), self._coders[0].error_bound(x), x.dtype)

    def error_bound_within(self, magnitudes: Tensor) -> Tensor:
        """The same for any tensor of at most these `magnitudes`."""
        return self._bound(magnitudes.float(), self._coders[0].error_bound_within(magnitudes), magnitudes.dtype)

    def next_shared(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """What both ends share for the next message of the codec that warm-starts."""
        for term, part, sent in zip(self.terms, self._parts(payload, shape, dtype), self._dtypes(dtype), strict=True):
            if term.warm_starts:
                return term.next_shared(part, shape, sent)
        return None

    def _encode(self, x: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        sizes = self._sizes(x.shape, x.dtype)
        rest: Tensor | Make = x
        payload = torch.empty(sum(sizes), dtype=torch.uint8, device=x.device) if self.varies else out
        stop, last = LENGTH_BYTES, len(sizes) - 1
        for index, (coder, part) in enumerate(zip(self._coders, payload.split(sizes), strict=True)):
            own_key, start = key.of_part(index), shared if coder.warm_starts else None
            if index < last:
                rest = _encode_and_lose(coder, _whole(rest, x), part, own_key, start)
            elif isinstance(coder, Blockwise) and not isinstance(rest, Tensor):
                coder.encode_made(x.shape, x.device, rest, part, own_key)
            else:
                coder.encode(_whole(rest, x), part, own_key, start)
            if self.varies:
                used = coder.used(part)
                out[stop : stop + used] = part[:used]
                stop += used
        if self.varies:
            put_length(stop, out)

    def _decode(self, payload: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        parts = self._parts(payload, out.shape, out.dtype)
        first, *others = self._coders
        in_place = out.dtype == torch.float32
        values = out if in_place else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        first.decode(parts[0], values, key, shared if first.warm_starts else None)
        total = values.float()
        for index, (coder, part) in enumerate(zip(others, parts[1:], strict=True), 1):
            if isinstance(coder, Blockwise):
                coder.add_decoded(part, total)
                continue
            values = torch.empty(out.shape, dtype=torch.float32, device=out.device)
            coder.decode(part, values, key.of_part(index), shared if coder.warm_starts else None)
            total.add_(values)
        if not in_place:
            saturating_copy(total, out)

    def _bound(self, magnitude: Tensor, first: Tensor, dtype: torch.dtype) -> Tensor:
        """The bound of the sum, given that of its first codec and the largest magnitudes."""
        # an infinity less an infinity is NaN, which the next codec spreads over a block
        bound = torch.where(magnitude.isfinite(), first.float().expand(magnitude.shape), torch.inf)
        span, roundings = magnitude + bound, 2 + sum(term.rank for term in self.terms if isinstance(term, LowRank))
        for term in self._coders[1:]:
            within: Tensor = call_method(
                term, "error_bound_within", bound + roundings * rounding_bound(span, torch.float32)
            )
            bound = within.float().expand(magnitude.shape)
            span = span + bound
        bound = bound + roundings * len(self.terms) * rounding_bound(span, torch.float32)
        bound = bound + rounding_bound(magnitude + bound, dtype)
        return infinite_beyond(bound, magnitude, dtype)

    def _dtypes(self, dtype: torch.dtype) -> list[torch.dtype]:
        """The dtype of what each codec gets, of a tensor of `dtype`."""
        return [dtype, *[torch.float32] * (len(self.terms) - 1)]

    def _sizes(self, shape: Sequence[int], dtype: torch.dtype) -> list[int]:
        """The size of each codec's payload."""
        return [size_of(term, shape, sent) for term, sent in zip(self.terms, self._dtypes(dtype), strict=True)]

    def _parts(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """The payload of each codec, with room for the longest."""
        sizes = self._sizes(shape, dtype)
        if not self.varies or not prod(shape):
            return list(payload.split(sizes))
        parts, start, length = [], LENGTH_BYTES, length_of(payload)
        for term, size in zip(self.terms, sizes, strict=True):
            sent = payload[start : min(start + size, length)]
            part = torch.nn.functional.pad(sent, (0, size - len(sent)))
            start += term.used(part)
            parts.append(part)
        if start != length:
            raise CodecError(f"a payload of {self} must end where it says, at byte {length}, got {start}")
        return parts


def _whole(rest: Tensor | Make, x: Tensor) -> Tensor:
    """What is left of `x`, as one tensor."""
    return rest if isinstance(rest, Tensor) else rest(0, x.numel()).view(x.shape)


def _encode_and_lose(coder: Codec, x: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> Tensor | Make:
    """Write a codec's payload of `x`, and return what it loses, in float32."""
    if isinstance(coder, Blockwise) and x.dtype == torch.float32:  # of others none has such a pass
        # added to x it changes nothing, not even a zero's sign
        lost = torch.full_like(x, -0.0, memory_format=torch.contiguous_format)
        if coder.encode_with_error(x, lost, 1.0, out, key):
            return lost
    coder.encode(x, out, key, shared)
    if isinstance(coder, LowRank) and (made := coder.lost(x, out)):
        return made
    decoded = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    coder.decode(out, decoded, key, shared)
    decoded = decoded.float()
    return torch.sub(x.float(), decoded, out=decoded)
