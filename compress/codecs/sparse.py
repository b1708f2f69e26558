"""The sparse codecs: topk and randk send k elements of each sample; the others are decoded as zeros.

payload     | indices (topk only) | values |      indices are packed as in indices.py

topk(.., code="entropy")    | T, uint32 | values | indices |

There indices are packed as in gaps.py, or where that is no shorter as in indices.py. T counts all bytes that are
sent.

A sample is one index of the first dimension, flattened; a tensor of fewer than two dimensions is one sample. With
`per="row"` each row sends its own k, as if it were a sample: a token of a language model, or a channel of an image.
Where a model normalizes each token, as transformers do, a token of zeros has a gradient hundreds of times too large.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from thinwire.compress.codec import Codec, CodecError, Key, require_choice, require_floating
from thinwire.compress.codecs.cast import BFloat16, Cast, Float16, Uncompressed, rounding_bound, saturating_copy
from thinwire.compress.codecs.coding.gaps import pack_gaps, unpack_gaps
from thinwire.compress.codecs.coding.lengths import (
    LENGTH_BYTES,
    Code,
    MayVary,
    check_code,
    length_of,
    put_length,
    with_length,
)
from thinwire.compress.codecs.granularity import blocks_per
from thinwire.compress.codecs.indices import (
    indices_size,
    largest,
    largest_magnitudes,
    magnitude_bits,
    pack_indices,
    put_values,
    random_indices,
    unpack_indices,
    values_at,
)
from thinwire.compress.codecs.means import Means
from thinwire.compress.codecs.quantize import Quantize
from thinwire.errors import attempt

Values = Literal["fp32", "fp16", "bf16", "q(8)", "q(4)", "means(2)"]
Samples = Literal["sample", "row"]


@dataclass(frozen=True, repr=False)
class _Float32(Cast):
    """float32, for values only: not a codec in expressions."""

    name: ClassVar[str] = "fp32"
    wire: ClassVar[torch.dtype] = torch.float32


_VALUES: Mapping[Values, Codec] = MappingProxyType(
    {
        "fp32": _Float32(),
        "fp16": Float16(),
        "bf16": BFloat16(),
        "q(8)": Quantize(8, grid="midrise"),
        "q(4)": Quantize(4, grid="midrise"),
        "means(2)": Means(),
    }
)


@dataclass(frozen=True, repr=False)
class Sparse(Codec):
    """A codec that sends some elements of each sample: the part that `topk` and `randk` share."""

    fraction: float
    """The share of each sample's elements that is sent, above 0 and at most 1."""
    values: Values = field(default="fp32", kw_only=True)
    """The format of the values; a tensor whose own elements are not larger sends them as they are."""
    per: Samples = field(default="sample", kw_only=True)
    """What `fraction` is a share of: each sample, or each row of it."""

    def __post_init__(self) -> None:
        is_share = type(self.fraction) in (int, float) and 0 < self.fraction <= 1
        attempt(
            lambda: CodecError.require(
                (is_share, f"{self.name}'s fraction must be above 0 and at most 1, got {self.fraction!r}")
            ),
            lambda: require_choice(self, "values", self.values, get_args(Values)),
            lambda: require_choice(self, "per", self.per, get_args(Samples)),
        )
        object.__setattr__(self, "fraction", float(self.fraction))

    def count(self, n: int) -> int:
        """How many of `n` elements are sent: round(fraction * n), half to even, and at least 1 unless n is 0."""
        return min(n, max(1, round(self.fraction * n)))

    def samples_of(self, shape: Sequence[int]) -> tuple[int, int]:
        """How many samples a tensor of `shape` has, or rows with `per="row"`, and how many elements each: (N, n)."""
        if self.per == "row" and 0 not in shape:
            rows = blocks_per("row", shape)
            return rows.count, rows.inner
        return (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))

    @abstractmethod
    def select(self, x: Tensor, key: Key) -> Tensor:
        """The indices that `encode` would send: int64 [N, k], ascending, among the elements of `x`."""

    @abstractmethod
    def indices(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, key: Key) -> Tensor:
        """The indices [N, k] of the values in a payload, read from it or drawn from `key`."""

    def encode_at(self, x: Tensor, indices: Tensor, out: Tensor, key: Key) -> None:
        """Write a payload as `encode` does, with `indices` [N, k] instead of its own choice.

        A codec that takes no indices sends none: the indices must be those of `key`.
        """
        self._check_payload(out, x)
        if x.numel():
            size = self._indices_size(x.shape)
            pack_indices(indices, self.samples_of(x.shape)[1], out[:size])
            self.encode_values(x.detach(), indices, out[size:], key)

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The size of indices, if they are sent, and values; 0 for a tensor without elements."""
        require_floating(self, dtype)
        return self._indices_size(shape) + self.values_size(shape, dtype)

    def values_size(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The size of the values alone."""
        samples, n = self.samples_of(shape)
        return self._values_codec(dtype).nbytes((samples, self.count(n)), dtype)

    def encode_values(self, x: Tensor, indices: Tensor, out: Tensor, key: Key) -> None:
        """Write the values of `x`, not empty, at `indices` [N, k] into `out`: uint8 [values_size]."""
        self._values_codec(x.dtype).encode(values_at(indices, x), out, key)

    def decode_values(self, payload: Tensor, indices: Tensor, out: Tensor, key: Key) -> None:
        """Write zeros into `out`, not empty and contiguous, and a payload's values at `indices` [N, k]."""
        kept = torch.empty(indices.shape, dtype=out.dtype, device=out.device)
        self._values_codec(out.dtype).decode(payload, kept, key)
        scale = self._scale(self.samples_of(out.shape)[1])
        if scale != 1:
            saturating_copy(kept.to(torch.promote_types(out.dtype, torch.float32)) * scale, kept)
        put_values(kept, indices, out.zero_())

    def bound_at_any_indices(self, x: Tensor) -> Tensor:
        """The largest error of each element, for any choice of indices."""
        samples, n = self.samples_of(x.shape)
        values, scale = x.detach().reshape(samples, n), self._scale(n)
        magnitude, of_value = _magnitude(values), self._values_codec(x.dtype).error_bound_within(values)
        if_sent = magnitude * (scale - 1) + scale * of_value
        if scale != 1:
            decoded = scale * (magnitude + of_value)
            if_sent += rounding_bound(decoded, x.dtype) + rounding_bound(decoded, torch.float32)
        return torch.maximum(magnitude, if_sent).view(x.shape)

    def _encode(self, x: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        self.encode_at(x, self.select(x, key), out, key)

    def _decode(self, payload: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        indices = self.indices(payload, out.shape, out.dtype, key)
        self.decode_values(payload[self._indices_size(out.shape) :], indices, out, key)

    @abstractmethod
    def _indices_size(self, shape: Sequence[int]) -> int: ...

    def _scale(self, n: int) -> float:
        return 1.0

    def _values_codec(self, dtype: torch.dtype) -> Codec:
        codec = _VALUES[self.values]
        as_it_is = isinstance(codec, Cast) and dtype.itemsize <= codec.wire.itemsize
        return Uncompressed() if as_it_is else codec


@dataclass(frozen=True, repr=False)
class TopK(MayVary, Sparse):
    """`topk(fraction)`: the elements of largest magnitude; of equals the first, and NaN before all others.

    It sends exactly k = max(1, round(fraction * n)) of a sample's n. No element is off by more than the least magnitude
    kept, or the error of the values' format. |x - C(x)|**2 <= (1 - k/n) * |x|**2 if values are exact.
    """

    name: ClassVar[str] = "topk"
    takes_indices: ClassVar[bool] = True

    code: Code | None = field(default=None, kw_only=True)
    """`entropy`: indices take about their entropy, so a payload may be shorter than `nbytes`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_code(self, self.code)

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The size of indices and values; with `code` the most, and four bytes more. 0 without elements."""
        nbytes = super().nbytes(shape, dtype)
        return with_length(nbytes) if self.varies and nbytes else nbytes

    def encode_at(self, x: Tensor, indices: Tensor, out: Tensor, key: Key) -> None:
        """Write a payload as `encode` does, with `indices` [N, k] instead of its own choice."""
        if not self.varies or not x.numel():
            super().encode_at(x, indices, out, key)
            return
        self._check_payload(out, x)
        start = LENGTH_BYTES + self.values_size(x.shape, x.dtype)
        self.encode_values(x.detach(), indices, out[LENGTH_BYTES:start], key)
        n = self.samples_of(x.shape)[1]
        coded = pack_gaps(indices, n) if start < len(out) else out[start:]
        if len(coded) < len(out) - start:
            out[start : start + len(coded)] = coded
        else:
            pack_indices(indices, n, out[start:])
        put_length(min(start + len(coded), len(out)), out)

    def select(self, x: Tensor, key: Key) -> Tensor:
        """The indices of the k largest magnitudes: int64 [N, k]."""
        samples, n = self.samples_of(x.shape)
        return largest_magnitudes(x.detach().reshape(samples, n), self.count(n))

    def indices(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, key: Key) -> Tensor:
        """The indices [N, k] in the payload."""
        samples, n = self.samples_of(shape)
        if self.varies:
            length, start = length_of(payload), LENGTH_BYTES + self.values_size(shape, dtype)
            read = unpack_indices if length == len(payload) else unpack_gaps
            return read(payload[start:length], samples, n, self.count(n))
        return unpack_indices(payload[: self._indices_size(shape)], samples, n, self.count(n))

    def error_bound(self, x: Tensor) -> Tensor:
        """The least magnitude kept of each sample, or the error of the values' format if that is more."""
        if not x.numel():
            return torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        samples, n = self.samples_of(x.shape)
        sent = largest_magnitudes(x.detach().reshape(samples, n), self.count(n))
        kept = values_at(sent, x.detach())
        least = _magnitude(kept).nan_to_num(nan=torch.inf, posinf=torch.inf).amin(1, keepdim=True)
        of_value = self._values_codec(x.dtype).error_bound(kept).expand(kept.shape)
        return put_values(torch.maximum(least, of_value), sent, least.repeat(1, n)).view(x.shape)

    def error_bound_within(self, magnitudes: Tensor) -> Tensor:
        """The k-th largest of each sample's `magnitudes`, or the error of the values' format if that is more."""
        if not magnitudes.numel():
            return self.error_bound(magnitudes)
        samples, n = self.samples_of(magnitudes.shape)
        rows = magnitudes.detach().reshape(samples, n)
        least = rows.topk(self.count(n)).values[:, -1:]
        of_value = self._values_codec(magnitudes.dtype).error_bound_within(rows).float()
        return torch.maximum(least, of_value).expand(samples, n).reshape(magnitudes.shape)

    def _decode(self, payload: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        if not self.varies:
            super()._decode(payload, out, key, shared)
            return
        indices = self.indices(payload, out.shape, out.dtype, key)
        values = payload[LENGTH_BYTES : LENGTH_BYTES + self.values_size(out.shape, out.dtype)]
        self.decode_values(values, indices, out, key)

    def _indices_size(self, shape: Sequence[int]) -> int:
        samples, n = self.samples_of(shape)
        return indices_size(samples, n, self.count(n))


@dataclass(frozen=True, repr=False)
class RandK(Sparse):
    """`randk(fraction)`: elements drawn at random from the message's key, so that no index is sent.

    Without feedback, decoded values are multiplied by n/k: the expectation over keys is x, up to the values' rounding.
    """

    name: ClassVar[str] = "randk"

    scaled: bool = field(default=True, kw_only=True)
    """Whether decoded values are multiplied by n/k; feedback uses the codec without."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.scaled) is not bool:
            raise CodecError(f"randk's scaled must be True or False, got {self.scaled!r}")

    def unscaled(self) -> "RandK":
        """The codec that does not multiply."""
        return replace(self, scaled=False)

    def select(self, x: Tensor, key: Key) -> Tensor:
        """The indices [N, k] that follow from `key`."""
        return self._drawn(x.shape, x.device, key)

    def indices(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, key: Key) -> Tensor:
        """The indices [N, k] that follow from `key`."""
        return self._drawn(shape, payload.device, key)

    def error_bound(self, x: Tensor) -> Tensor:
        """The larger of `|x|` and `|x| * (n/k - 1)`, or `|x|` if unscaled, and the values' own error."""
        return self.bound_at_any_indices(x)

    def _drawn(self, shape: Sequence[int], device: torch.device, key: Key) -> Tensor:
        samples, n = self.samples_of(shape)
        return random_indices(key.words(device), samples, n, self.count(n))

    def _indices_size(self, shape: Sequence[int]) -> int:
        return 0

    def _scale(self, n: int) -> float:
        return n / self.count(n) if self.scaled and n else 1.0


def mixed_indices(x: Tensor, error: Tensor, k: int) -> Tensor:
    """Which indices EF-mixed sends of `x + error`, two floating tensors [N, n]: int64 [N, k].

    P is the union of the ceil(k/2) largest of |x| and the floor(k/2) largest of |error|, filled up to k with the
    largest of |x + error| outside P; of equals the first (after 2401.07788, which says only "at most k").
    """
    x, error = x.detach(), error.detach()
    total = magnitude_bits(x + error)
    first = torch.iinfo(total.dtype).max
    total.clamp_(max=first - 1)  # so that P comes first, before NaN too
    for part, count in ((x, (k + 1) // 2), (error, k // 2)):
        total.view(-1)[largest_magnitudes(part, count).view(-1)] = first
    return largest(total, k)


def _magnitude(x: Tensor) -> Tensor:
    """`|x|` as float32, rounded so that it is not below the float64 value."""
    magnitude = x.float().abs()
    return magnitude + rounding_bound(magnitude, torch.float32)
