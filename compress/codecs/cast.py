"""The codecs that only change the number format: none, fp16 and bf16.

| element 0 | element 1 | ..
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compress.codec import Codec, Key, require_floating, tensor_bytes


@dataclass(frozen=True, repr=False)
class Uncompressed(Codec):
    """`none`: the tensor's own bytes, of any dtype, in row-major order."""

    name: ClassVar[str] = "none"

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The size of the tensor itself."""
        return prod(shape) * dtype.itemsize

    def error_bound(self, x: Tensor) -> Tensor:
        """0: nothing is lost."""
        return torch.zeros((), dtype=torch.float32, device=x.device)

    def _encode(self, x: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        out.copy_(tensor_bytes(x))

    def _decode(self, payload: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        tensor_bytes(out).copy_(payload)


@dataclass(frozen=True, repr=False)
class Cast(Codec):
    """A floating-point tensor sent in another floating-point format, rounded to nearest, ties to even."""

    wire: ClassVar[torch.dtype]
    """The format on the wire."""

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """One wire element for each element."""
        require_floating(self, dtype)
        return prod(shape) * self.wire.itemsize

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
        out.copy_(tensor_bytes(sent))

    def _decode(self, payload: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        sent = torch.empty(out.shape, dtype=self.wire, device=out.device)
        tensor_bytes(sent).copy_(payload)
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
