"""The codec lowrank: a matrix sent as two thin ones, after PowerSGD (1905.13727).

payload     | factors                   |
            | the tensor's own elements |     if that is shorter

Factors P [N, rows, r] and Q [N, columns, r] of N matrices are sent as

number format     | scale of matrix 0, float32 | .. | P of matrix 0, row-major | .. | Q of matrix 0, row-major | .. |
a quantizer       | payload of all P^T, [N, r, rows] | payload of all Q^T, [N, r, columns] |

Transposed, a row of the quantizer is a column of P or Q. Those of Q differ in size as M's singular values do.

The rows of the matrix are those of `per="row"`: [B, T, C] becomes [B*T, C], [N, C, H, W] becomes [N*C, H*W], a matrix
stays as it is, and a tensor of fewer than two dimensions is one row. With `per="sample"` each sample is a matrix of its
own: [T, C], [C, H*W], or one row.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod, sqrt
from types import MappingProxyType
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from thinwire.compress.codec import (
    NO_KEY,
    Codec,
    CodecError,
    Key,
    literal,
    require_choice,
    require_floating,
    require_int,
    size_of,
    tensor_bytes,
)
from thinwire.compress.codecs.blockwise import Blockwise
from thinwire.compress.codecs.cast import infinite_beyond, rounding_bound, saturating_copy
from thinwire.compress.codecs.granularity import blocks_per
from thinwire.compress.transfer import put
from thinwire.errors import attempt

_SCALE_BYTES = 4
_SMALLEST_EXPONENT = -118
_LARGEST_EXPONENT = 127


@dataclass(frozen=True)
class MatrixSizes:
    """N matrices of [rows, columns], and the rank r of their factors."""

    samples: int
    rows: int
    columns: int
    rank: int


class Factors(ABC):
    """A way to send P and Q."""

    @abstractmethod
    def nbytes(self, sizes: MatrixSizes) -> int:
        """The size of both."""

    @abstractmethod
    def write_left(self, left: Tensor, sizes: MatrixSizes, out: Tensor, key: Key) -> Tensor:
        """Write P, float32 [N, rows, r], into a payload, and return it as it arrives, in float32."""

    @abstractmethod
    def write_right(self, right: Tensor, sizes: MatrixSizes, out: Tensor, key: Key) -> None:
        """Write Q, float64 [N, columns, r], into a payload."""

    @abstractmethod
    def read(self, payload: Tensor, sizes: MatrixSizes) -> tuple[Tensor, Tensor, Tensor]:
        """P and Q in float64, and what their product is multiplied by: float64 [N, 1, 1]."""

    @abstractmethod
    def bound(self, norms: Tensor, total: Tensor, sizes: MatrixSizes) -> Tensor:
        """The most that sending P and Q may move a column of M, and that its own norm does not bound.

        Both `norms`, of each column [N, 1, columns], and `total`, of M [N, 1, 1], are float64.
        """


@dataclass(frozen=True)
class FormattedFactors(Factors):
    """Elements in a floating-point format. Q is divided by a power of two, so that fp16 loses no magnitude."""

    format: torch.dtype

    def nbytes(self, sizes: MatrixSizes) -> int:
        """The size of the scales and of all elements."""
        elements = sizes.samples * (sizes.rows + sizes.columns) * sizes.rank
        return sizes.samples * _SCALE_BYTES + elements * self.format.itemsize

    def write_left(self, left: Tensor, sizes: MatrixSizes, out: Tensor, key: Key) -> Tensor:
        """Write P behind the scales."""
        rounded = left.to(self.format)
        _, place, _ = self._places(out, sizes)
        place.copy_(tensor_bytes(rounded))
        return rounded.float()

    def write_right(self, right: Tensor, sizes: MatrixSizes, out: Tensor, key: Key) -> None:
        """Write the scales, and behind P Q over its scale."""
        scale = power_of_two_above(right.abs().amax((1, 2), keepdim=True))
        scaled = (right / scale.masked_fill(scale == 0, torch.inf)).to(self.format)
        first, _, last = self._places(out, sizes)
        first.copy_(tensor_bytes(scale.float()))
        last.copy_(tensor_bytes(scaled))

    def read(self, payload: Tensor, sizes: MatrixSizes) -> tuple[Tensor, Tensor, Tensor]:
        """P, Q over its scale, and the scale."""
        scale, left, right = (part.clone() for part in self._places(payload, sizes))
        shape = (sizes.samples, -1, sizes.rank)
        p, q = (part.view(self.format).view(shape).double() for part in (left, right))
        return p, q, scale.view(torch.float32).view(-1, 1, 1).double()

    def bound(self, norms: Tensor, total: Tensor, sizes: MatrixSizes) -> Tensor:
        """P's columns, once rounded, are orthonormal to sqrt(r) * eps."""
        return total * (2 * sqrt(sizes.rank) * torch.finfo(self.format).eps)

    def _places(self, payload: Tensor, sizes: MatrixSizes) -> tuple[Tensor, Tensor, Tensor]:
        """The scales, P and Q in a payload."""
        stop = sizes.samples * _SCALE_BYTES
        left = sizes.samples * sizes.rows * sizes.rank * self.format.itemsize
        scale, first, last = payload.tensor_split([stop, stop + left])
        return scale, first, last


@dataclass(frozen=True)
class QuantizedFactors(Factors):
    """Columns of P and Q through a quantizer."""

    codec: Codec

    def nbytes(self, sizes: MatrixSizes) -> int:
        """The size of both payloads."""
        return sum(self._nbytes(sizes))

    def write_left(self, left: Tensor, sizes: MatrixSizes, out: Tensor, key: Key) -> Tensor:
        """Write the payload of P^T."""
        part, arrived = out[: self._nbytes(sizes)[0]], torch.empty_like(left.mT, memory_format=torch.contiguous_format)
        self.codec.encode(left.mT, part, key)
        self.codec.decode(part, arrived, NO_KEY)  # quantizers draw random numbers only where they encode
        return arrived.mT

    def write_right(self, right: Tensor, sizes: MatrixSizes, out: Tensor, key: Key) -> None:
        """Write the payload of Q^T."""
        self.codec.encode(right.mT.float(), out[self._nbytes(sizes)[0] :], key.of("Q"))

    def read(self, payload: Tensor, sizes: MatrixSizes) -> tuple[Tensor, Tensor, Tensor]:
        """P, Q and 1."""
        shapes, size = self._shapes(sizes), self._nbytes(sizes)[0]
        left, right = (torch.empty(shape, dtype=torch.float32, device=payload.device) for shape in shapes)
        self.codec.decode(payload[:size], left, NO_KEY)
        self.codec.decode(payload[size:], right, NO_KEY)
        one = torch.ones(sizes.samples, 1, 1, dtype=torch.float64, device=payload.device)
        return left.mT.double(), right.mT.double(), one

    def bound(self, norms: Tensor, total: Tensor, sizes: MatrixSizes) -> Tensor:
        """P's norm is at most 1 + e, with e the norm of its error; Q's columns are at most that times M's."""
        left, right = self._shapes(sizes)
        of_left = self.codec.error_bound_within(torch.ones(left, dtype=torch.float32, device=norms.device)).double()
        most = 1 + of_left.square().sum((1, 2), keepdim=True).sqrt()
        largest = (most * norms).float()
        of_right = self.codec.error_bound_within(largest.expand(right).contiguous()).double()
        moved = most * of_right.square().sum(1, keepdim=True).sqrt()
        # Q is in float32, and a quantizer gives infinity near the end of it
        in_range = (most * total < torch.finfo(torch.float32).max / 2).double().log()
        return norms * (most.square() - 2).clamp(min=0) + moved + most.square() * _FLOAT32 * total - in_range

    def _shapes(self, sizes: MatrixSizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those of P^T and Q^T."""
        return (sizes.samples, sizes.rank, sizes.rows), (sizes.samples, sizes.rank, sizes.columns)

    def _nbytes(self, sizes: MatrixSizes) -> tuple[int, int]:
        """Those of both payloads."""
        left, right = (size_of(self.codec, shape, torch.float32) for shape in self._shapes(sizes))
        return left, right


_FLOAT32 = 2.0**-16
"""More than what float32 adds to the norm of a product."""

FORMATS: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
)
"""The number formats by name."""


@cache
def factors_of(values: str) -> Factors:
    """The way to send factors that `values` names: a number format or a quantizer."""
    return FormattedFactors(FORMATS[values]) if values in FORMATS else QuantizedFactors(_quantizer(values))


def check_values(name: str, values: object) -> str:
    """`values` as expressions write it; CodecError if it names neither a format nor a quantizer."""
    if isinstance(values, str):
        if values in FORMATS:
            return values
        try:
            return str(_quantizer(values))
        except CodecError:
            pass
    formats = ", ".join(f'"{name}"' for name in FORMATS)
    raise CodecError(f'{name}\'s values must be {formats}, or a quantizer such as "q(8)", got {literal(values)}')


def _quantizer(values: str) -> Codec:
    """The quantizer that an expression names."""
    from thinwire.compress.expression import parse  # it imports all codecs, this one too

    codec = parse(values)
    if not isinstance(codec, Blockwise) or codec.varies:
        raise CodecError(f"{values} is no quantizer of a fixed size")
    return codec


def power_of_two_above(x: Tensor) -> Tensor:
    """The least power of two above `x`, float64, but 2**127 at most; 0 if `x` is too small, NaN if it is not finite."""
    exponent = torch.frexp(x.double()).exponent.clamp(max=_LARGEST_EXPONENT)
    power = torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent)
    return torch.where(exponent < _SMALLEST_EXPONENT, 0.0, power) + (x - x)


Matrices = Literal["tensor", "sample"]
_LARGE = 2.0**48
_ROWS = 64
"""Rows of a product on a CPU that are added at a time: 1.6 times as fast as all at once at 16 M elements."""
_PART = 1 << 18
"""Elements decoded at a time: their float64 sums take twice the memory of the tensor."""


@dataclass(frozen=True, repr=False)
class LowRank(Codec):
    """`lowrank(rank)`: M [rows, columns] as P Q^T with r = min(rank, rows, columns) columns each.

        P = orthonormal basis of M Q0,    Q = M^T P,    decoded P Q^T

    Q0 is `shared`: the Q of the last message in the same place. So each message is one step of the power iteration
    toward M's r strongest directions. If there is none, or it is all zeros, not finite or of another shape, Q0 is
    Gaussian, drawn from the key. Only the encoder needs it; `next_shared` reads it from the payload.

    P Q^T is M projected on the basis. So the error is at most |M|, and only rounding if M's rank is at most r. If a
    matrix has NaN or infinity, no decoded element of it is finite.

    Arithmetic is in float32. Q is divided by the power of two above its largest element, so that fp16 loses no
    magnitude; by 2**127 at most. If that element is below 2**-118, zeros are decoded.

    With `values="fp16"` the decoded tensor is the same on every machine: elements of both are multiples of 2**-24 and
    at most 1, products are multiples of 2**-48, and float64 holds every sum exactly, in any order, fused or not. With
    all others the last bit in float32 depends on the order of sums, and so on the machine. That is harmless if
    only the receiver uses them, but a buffer kept by two unlike machines (ef21, aqsgd) would drift apart.
    """

    name: ClassVar[str] = "lowrank"

    rank: int
    """Columns of P and Q, 1 to 512."""
    values: str = field(default="fp16", kw_only=True)
    """How P and Q are sent: `fp16`, `bf16`, `fp32`, or each of their columns through a quantizer such as `q(8)`."""
    per: Matrices = field(default="tensor", kw_only=True)
    """What becomes a matrix: the whole tensor, or each sample."""

    def __post_init__(self) -> None:
        attempt(
            lambda: require_int(self, "rank", self.rank, 1, 512),
            lambda: object.__setattr__(self, "values", check_values(self.name, self.values)),
            lambda: require_choice(self, "per", self.per, get_args(Matrices)),
        )

    @property
    def warm_starts(self) -> bool:
        """Always: a message starts from the last Q."""
        return True

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The size of the factors, or of the tensor itself if that is less."""
        require_floating(self, dtype)
        return min(self._factors.nbytes(self._sizes(shape)), _plain_size(shape, dtype)) if prod(shape) else 0

    def error_bound(self, x: Tensor) -> Tensor:
        """The norm of each column of M, plus rounding: no projection moves a column further."""
        if self._sends_plain(x.shape, x.dtype):
            return torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        sizes = self._sizes(x.shape)
        matrix = x.detach().reshape(sizes.samples, sizes.rows, sizes.columns).double()
        norms = torch.linalg.vector_norm(matrix, dim=1, keepdim=True)
        total = torch.linalg.vector_norm(norms, dim=2, keepdim=True)
        # The computed P and Q add float32's own rounding. If one element is not finite, no bound is.
        of_float32 = total * (4 * sqrt(sizes.rows + sizes.columns) * torch.finfo(torch.float32).eps)
        bound: Tensor = norms + self._factors.bound(norms, total, sizes) + of_float32 + (total - total)
        bound = bound + rounding_bound(2 * bound, x.dtype)
        bound = bound.float().expand(matrix.shape).reshape(x.shape)
        return infinite_beyond(bound, x.detach().float().abs(), x.dtype)

    def next_shared(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """The payload's Q as float32 [columns, r], one for each sample with `per="sample"`; None if it has none."""
        if self._sends_plain(shape, dtype):
            return None
        _, right, scale = self._factors.read(payload, self._sizes(shape))
        shared = (right * scale).float()
        return shared if self.per == "sample" else shared.squeeze(0)

    def _encode(self, x: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        if self._sends_plain(x.shape, x.dtype):
            out.copy_(tensor_bytes(x))
            return
        sizes = self._sizes(x.shape)
        matrix = x.reshape(sizes.samples, sizes.rows, sizes.columns).float().contiguous()
        largest = _largest(matrix)
        unit = power_of_two_above(largest)
        unit = unit.masked_fill(unit == 0, 1.0)
        if matrix.is_cpu and bool(((unit > 1 / _LARGE) & (unit < _LARGE)).all()):
            after, unit = unit.float(), torch.ones_like(unit)  # a power of two changes no bit: later it divides less
        else:  # sums of elements near float32's limit would overflow; a GPU would wait for the answer
            matrix, after = matrix / unit.float(), torch.ones_like(unit).float()
        with torch.autocast(x.device.type, enabled=False):  # the caller's would round what is multiplied
            left = _orthonormal(matrix @ _start(shared, matrix, sizes, key) / after)
            left = self._factors.write_left(left, sizes, out, key)
            right = _transposed_times(matrix, left)
        self._factors.write_right(right.double() * unit, sizes, out, key)

    def _decode(self, payload: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        if self._sends_plain(out.shape, out.dtype):
            tensor_bytes(out).copy_(payload)
            return
        sizes = self._sizes(out.shape)
        left, right, scale = self._factors.read(payload, sizes)
        right.mul_(scale)  # a power of two, so it is the same before the sums as after them
        matrix = out.view(sizes.samples, sizes.rows, sizes.columns)
        for some, rows in _parts(sizes):
            saturating_copy(torch.matmul(left[some, rows], right[some].mT), matrix[some, rows])

    def _sends_plain(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether the tensor's own elements are shorter than the factors, as they are where there are none."""
        return not prod(shape) or _plain_size(shape, dtype) < self._factors.nbytes(self._sizes(shape))

    def _sizes(self, shape: Sequence[int]) -> MatrixSizes:
        """The matrices that a non-empty tensor of `shape` becomes."""
        row = blocks_per("row", shape)
        samples = shape[0] if self.per == "sample" and len(shape) > 1 else 1
        rows = row.count // samples
        return MatrixSizes(samples, rows, row.inner, min(self.rank, rows, row.inner))

    @property
    def _factors(self) -> Factors:
        return factors_of(self.values)


def _start(shared: Tensor | None, matrix: Tensor, sizes: MatrixSizes, key: Key) -> Tensor:
    """Q0, float32 [N, columns, r], scaled so that M Q0 does not overflow before M does."""
    shape = (sizes.samples, sizes.columns, sizes.rank)
    drawn = put(torch.randn(shape, generator=key.generator(), dtype=torch.float32), matrix.device)
    if shared is None or shared.shape[-2:] != shape[-2:] or shared.numel() != drawn.numel():
        return drawn
    shared = shared.view(shape)
    largest = shared.abs().amax((1, 2), keepdim=True)
    usable = largest.isfinite() & (largest > 0)
    return torch.where(usable, shared / largest, drawn)


def _largest(matrix: Tensor) -> Tensor:
    """max|x| of each of the matrices [N, rows, columns]: [N, 1, 1]."""
    if len(matrix) == 1:  # one pass over it, which torch makes fast for a whole tensor only
        least, most = torch.aminmax(matrix)
        return torch.maximum(most, -least).view(1, 1, 1)
    return torch.maximum(matrix.amax((1, 2), keepdim=True), -matrix.amin((1, 2), keepdim=True))


def _transposed_times(matrix: Tensor, left: Tensor) -> Tensor:
    """M^T P of each of the matrices [N, rows, columns]."""
    rows = _ROWS if matrix.is_cpu else matrix.shape[1]
    right = matrix[:, :rows].mT @ left[:, :rows]
    for row in range(rows, matrix.shape[1], rows):
        right.baddbmm_(matrix[:, row : row + rows].mT, left[:, row : row + rows])
    return right


def _parts(sizes: MatrixSizes) -> Iterator[tuple[slice, slice]]:
    """Yield the matrices, and the rows of them, to decode at a time."""
    some = max(1, _PART // (sizes.rows * sizes.columns))
    rows = max(1, _PART // sizes.columns)
    for first in range(0, sizes.samples, some):
        for row in range(0, sizes.rows, rows):
            yield slice(first, first + some), slice(row, row + rows)


def _plain_size(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of the tensor itself."""
    return prod(shape) * dtype.itemsize


def _orthonormal(matrix: Tensor) -> Tensor:
    """An orthonormal basis of the columns of each `matrix` [N, rows, r], with signs that make R's diagonal positive."""
    basis, triangle = torch.linalg.qr(matrix)
    diagonal = triangle.diagonal(dim1=1, dim2=2)
    signs = torch.ones_like(diagonal).masked_fill_(diagonal < 0, -1.0)
    oriented: Tensor = basis * signs.unsqueeze(1)
    return oriented
