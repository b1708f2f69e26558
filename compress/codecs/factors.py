"""How lowrank sends its factors P [N, rows, r] and Q [N, columns, r], of N matrices.

number format     | scale of matrix 0, float32 | .. | P of matrix 0, row-major | .. | Q of matrix 0, row-major | .. |
a quantizer       | payload of all P^T, [N, r, rows] | payload of all Q^T, [N, r, columns] |

Transposed, a row of the quantizer is a column of P or Q. Those of Q differ in size as M's singular values do.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import sqrt
from types import MappingProxyType

import torch
from torch import Tensor

from thinwire.compress.codec import NO_KEY, Codec, CodecError, Key, literal, size_of, tensor_bytes
from thinwire.compress.codecs.blockwise import Blockwise

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
