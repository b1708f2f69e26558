"""The codec lowrank: a matrix sent as two thin ones, after PowerSGD (1905.13727).

payload     | scale, float32 | P [rows, r], row-major | Q [columns, r], row-major |
            | the tensor's own elements |                                             if that is shorter

The rows of the matrix are those of `per="row"`: [B, T, C] becomes [B*T, C], [N, C, H, W] becomes [N*C, H*W], a matrix
stays as it is, and a tensor of fewer than two dimensions is one row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod, sqrt
from types import MappingProxyType
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from thinwire.compress.codec import Codec, Key, require_choice, require_floating, require_int, tensor_bytes
from thinwire.compress.codecs.cast import infinite_beyond, rounding_bound, saturating_copy
from thinwire.compress.codecs.granularity import blocks_per
from thinwire.errors import attempt

FactorFormat = Literal["fp16", "bf16", "fp32"]
_FORMATS: Mapping[FactorFormat, torch.dtype] = MappingProxyType(
    {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
)
_SCALE_BYTES = 4
_SMALLEST_EXPONENT = -118
_LARGEST_EXPONENT = 127


@dataclass(frozen=True, repr=False)
class LowRank(Codec):
    """`lowrank(rank)`: M [rows, columns] as P Q^T with r = min(rank, rows, columns) columns each.

        P = orthonormal basis of M Q0,    Q = M^T P,    decoded P Q^T

    Q0 is `shared`: the Q of the last message in the same place. So each message is one step of the power iteration
    toward M's r strongest directions. If there is none, or it is all zeros, not finite or of another shape, Q0 is
    Gaussian, drawn from the key. Only the encoder needs it; `next_shared` reads it from the payload.

    P Q^T is M projected on the basis. So the error is at most |M|, and only rounding if M's rank is at most r. If a
    tensor has NaN or infinity, no decoded element is finite.

    Arithmetic is in float32. Q is divided by the power of two above its largest element, so that fp16 loses no
    magnitude; by 2**127 at most. If that element is below 2**-118, zeros are decoded.

    With `values="fp16"` the decoded tensor is the same on every machine: elements of both are multiples of 2**-24 and
    at most 1, products are multiples of 2**-48, and float64 holds every sum exactly, in any order, fused or not. With
    the other formats the last bit in float32 depends on the order of sums, and so on the machine. That is harmless if
    only the receiver uses them, but a buffer kept by two unlike machines (ef21, aqsgd) would drift apart.
    """

    name: ClassVar[str] = "lowrank"
    warm_starts: ClassVar[bool] = True

    rank: int
    """Columns of P and Q, 1 to 512."""
    values: FactorFormat = field(default="fp16", kw_only=True)
    """How elements of P and Q are sent."""

    def __post_init__(self) -> None:
        attempt(
            lambda: require_int(self, "rank", self.rank, 1, 512),
            lambda: require_choice(self, "values", self.values, get_args(FactorFormat)),
        )

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The size of the scale, P and Q, or of the tensor itself if that is less."""
        require_floating(self, dtype)
        return min(self._factors_size(shape), _plain_size(shape, dtype))

    def error_bound(self, x: Tensor) -> Tensor:
        """The norm of each column of M, plus rounding: no projection moves a column further."""
        if self._sends_plain(x.shape, x.dtype):
            return torch.zeros(x.shape, device=x.device)
        rows, columns, rank = self._sizes(x.shape)
        matrix = x.detach().reshape(rows, columns).double()
        norms = torch.linalg.vector_norm(matrix, dim=0)
        total = torch.linalg.vector_norm(norms)
        # P's columns, once rounded, are orthonormal to sqrt(r) * eps; the computed P and Q add float32's own rounding.
        of_format = 2 * sqrt(rank) * torch.finfo(self._format).eps
        of_float32 = 4 * sqrt(rows + columns) * torch.finfo(torch.float32).eps
        # If one element is not finite, no bound is.
        bound: Tensor = norms + total * (of_format + of_float32) + (total - total)
        bound = bound + rounding_bound(2 * bound, x.dtype)
        bound = bound.float().expand(rows, columns).reshape(x.shape)
        return infinite_beyond(bound, x.detach().float().abs(), x.dtype)

    def next_shared(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """The payload's Q as float32 [columns, r]; None if it has none."""
        if self._sends_plain(shape, dtype):
            return None
        scale, _, right = self._read(payload, shape)
        return (right.double() * scale).float()

    def _encode(self, x: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        if self._sends_plain(x.shape, x.dtype):
            out.copy_(tensor_bytes(x))
            return
        rows, columns, rank = self._sizes(x.shape)
        matrix = x.reshape(rows, columns).float()
        unit = _power_of_two_above(matrix.abs().amax())
        unit = unit.masked_fill(unit == 0, 1.0)
        matrix = matrix / unit  # sums of elements near float32's limit would overflow
        left = _orthonormal(matrix @ self._start(shared, matrix, rank, key)).to(self._format)
        right = (matrix.t() @ left.float()).double() * unit
        scale = _power_of_two_above(right.abs().amax())
        scaled = (right / scale.masked_fill(scale == 0, torch.inf)).to(self._format)
        out.copy_(torch.cat([tensor_bytes(part) for part in (scale.float(), left, scaled)]))

    def _decode(self, payload: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        if self._sends_plain(out.shape, out.dtype):
            tensor_bytes(out).copy_(payload)
            return
        scale, left, right = self._read(payload, out.shape)
        product = torch.mm(left.double(), right.double().t()).mul_(scale)
        saturating_copy(product.view(out.shape), out)

    def _read(self, payload: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """The scale, float64 [], and P and Q as sent."""
        rows, columns, rank = self._sizes(shape)
        aligned = torch.empty(len(payload), dtype=torch.uint8, device=payload.device).copy_(payload)
        values = aligned[_SCALE_BYTES:].view(self._format).view(rows + columns, rank)
        return aligned[:_SCALE_BYTES].view(torch.float32).squeeze(0).double(), values[:rows], values[rows:]

    def _start(self, shared: Tensor | None, matrix: Tensor, rank: int, key: Key) -> Tensor:
        """Q0, float32 [columns, r], scaled so that M Q0 does not overflow before M does."""
        shape = (matrix.shape[1], rank)
        if shared is not None and shared.shape == shape:
            largest = shared.abs().amax()
            if largest.isfinite() and largest > 0:
                return shared / largest
        return torch.randn(shape, generator=key.generator(matrix.device), device=matrix.device)

    def _sends_plain(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether the tensor's own elements are shorter than the factors, as they are where there are none."""
        return _plain_size(shape, dtype) < self._factors_size(shape)

    def _factors_size(self, shape: Sequence[int]) -> int:
        """Bytes of the scale, P and Q."""
        rows, columns, rank = self._sizes(shape) if prod(shape) else (0, 0, 0)
        return _SCALE_BYTES + (rows + columns) * rank * self._format.itemsize

    def _sizes(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Rows, columns and r of a non-empty tensor of `shape`."""
        row = blocks_per("row", shape)
        return row.count, row.inner, min(self.rank, row.count, row.inner)

    @property
    def _format(self) -> torch.dtype:
        return _FORMATS[self.values]


def _plain_size(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of the tensor itself."""
    return prod(shape) * dtype.itemsize


def _orthonormal(matrix: Tensor) -> Tensor:
    """An orthonormal basis [rows, r] of the columns of `matrix`, with the signs that make R's diagonal positive."""
    basis, triangle = torch.linalg.qr(matrix)
    oriented: Tensor = basis * torch.where(triangle.diagonal() < 0, -1.0, 1.0)
    return oriented


def _power_of_two_above(x: Tensor) -> Tensor:
    """The least power of two above `x`, float64, but 2**127 at most; 0 if `x` is too small, NaN if it is not finite."""
    exponent = torch.frexp(x.double()).exponent.clamp(max=_LARGEST_EXPONENT)
    power = torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent)
    return torch.where(exponent < _SMALLEST_EXPONENT, 0.0, power) + (x - x)
