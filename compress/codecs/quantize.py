"""The codec q: uniform quantization to 1 to 8 bits, with one scale for each block of the tensor.

payload     | scale of block 0 | .. | scale of block C-1 | codes, packed |
absmax        bf16                                         ceil(b*n/8) bytes
minmax        float32 min, float32 max-min

The options rotate and outliers go around this; rotation.py and outliers.py say what they do and add.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from types import MappingProxyType
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from thinwire.compress.codec import Codec, CodecError, Key, require_choice, require_floating, require_int, tensor_bytes
from thinwire.compress.codecs.bits import ValueTable, entropy_with_codes, pack, packed_size
from thinwire.compress.codecs.cast import rounding_bound, saturating_copy
from thinwire.compress.codecs.granularity import Blocks, Per
from thinwire.compress.codecs.grid import AbsMaxGrid, Grid, MinMaxGrid
from thinwire.compress.codecs.outliers import OutliersApart
from thinwire.compress.codecs.quantizer import Quantizer
from thinwire.compress.codecs.rotation import Rotated
from thinwire.compress.codecs.scaled import blocks_for, resolve_per

Scale = Literal["absmax", "minmax"]
Round = Literal["nearest", "stochastic"]
Rotate = Literal["hadamard"]
_GRIDS: Mapping[Scale, type[Grid]] = MappingProxyType({"absmax": AbsMaxGrid, "minmax": MinMaxGrid})


@dataclass(frozen=True, repr=False)
class Quantize(Codec):
    """``q(bits)``: each element a code of ``bits`` bits on its block's grid.

    Arithmetic is in float32 whatever the tensor's dtype, to which the result is rounded. The largest error, with the
    block's own s, min and max, is

        absmax, nearest    s/2**b,  s = max|x| rounded up to bf16: at most max|x| * (1 + 2**-7)
        minmax, nearest    (max-min) / (2 * (2**b-1))

    and with stochastic rounding twice that (for absmax with s inflated, see AbsMaxGrid), plus float32's rounding and
    that of the tensor's dtype; ``error_bound`` counts all of it. Turned rows share their errors, see Rotated.
    """

    name: ClassVar[str] = "q"

    bits: int
    """Bits a code, 1 to 8."""
    scale: Scale = field(default="absmax", kw_only=True)
    """``absmax``: a grid from -max|x| to max|x|, without zero; ``minmax``: from the least to the largest value."""
    per: Per | None = field(default=None, kw_only=True)
    """What shares one scale; ``row`` if neither this nor ``group`` is given."""
    group: int | None = field(default=None, kw_only=True)
    """Instead of ``per``: how many consecutive elements share one scale."""
    round: Round = field(default="nearest", kw_only=True)
    """``stochastic``: up or down by chance, so that the expectation is the value itself."""

    rotate: Rotate | None = field(default=None, kw_only=True)
    """``hadamard``: turn each row before, and back after, so that outliers are spread over it."""
    outliers: float | None = field(default=None, kw_only=True)
    """The share of each row, its largest elements, kept apart in bf16, so that the rest has finer steps."""

    def __post_init__(self) -> None:
        require_int(self, "bits", self.bits, 1, 8)
        require_choice(self, "scale", self.scale, get_args(Scale))
        require_choice(self, "round", self.round, get_args(Round))
        object.__setattr__(self, "per", resolve_per(self, self.per, self.group))
        if self.rotate is not None:
            require_choice(self, "rotate", self.rotate, get_args(Rotate))
        if self.outliers is not None and (type(self.outliers) is not float or not 0 < self.outliers <= 0.5):
            raise CodecError(f"q's outliers must be a share above 0 and at most 0.5, got {self.outliers!r}")

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the size of all scales and of the packed codes, and of outliers; 0 for a tensor without elements."""
        require_floating(self, dtype)
        return self._quantizer.nbytes(shape) if prod(shape) else 0

    def error_bound(self, x: Tensor) -> Tensor:
        """Return the largest error of each element, in the shape of ``x``."""
        return self._quantizer.error_bound(x.detach()) if x.numel() else torch.zeros(x.shape, device=x.device)

    def entropy_bits(self, payload: Tensor, shape: Sequence[int]) -> float:
        """The entropy of the codes, and all beside them as it is sent."""
        return entropy_with_codes(payload, self.bits, prod(shape))

    def _encode(self, x: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        self._quantizer.encode(x, out, key)

    def _decode(self, payload: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        self._quantizer.decode(payload, out)

    @property
    def _quantizer(self) -> Quantizer:
        grid = _GRIDS[self.scale](self.bits, self.round == "stochastic")
        quantizer: Quantizer = GridQuantizer(grid, self._blocks)
        if self.rotate is not None:
            quantizer = Rotated(quantizer)
        if self.outliers is not None:
            quantizer = OutliersApart(quantizer, self.outliers, self._blocks)
        return quantizer

    def _blocks(self, shape: Sequence[int]) -> Blocks:
        return blocks_for(self.per, self.group, shape)


@dataclass(frozen=True)
class GridQuantizer(Quantizer):
    """Each element a code on its block's grid."""

    grid: Grid
    blocks: Callable[[Sequence[int]], Blocks]
    """The blocks of a tensor of some shape."""

    def nbytes(self, shape: Sequence[int]) -> int:  # noqa: D102
        return self._scales_size(self.blocks(shape)) + packed_size(prod(shape), self.grid.bits)

    def error_bound(self, x: Tensor) -> Tensor:
        """Return the largest error of each element's block."""
        blocks = self.blocks(x.shape)
        error, largest = self.grid.bound(self.grid.measure(blocks.view(x.float())))
        return blocks.spread(error + rounding_bound(largest, x.dtype), x.shape)

    def encode(self, x: Tensor, out: Tensor, key: Key) -> None:  # noqa: D102
        blocks, grid = self.blocks(x.shape), self.grid
        values = blocks.view(x.float())
        scales = grid.measure(values)
        noise = _noise(values, key) if grid.stochastic else None
        codes = grid.codes(values, scales, noise).view(-1)[: blocks.numel]
        size = self._scales_size(blocks)
        out[:size] = tensor_bytes(scales)
        pack(codes, grid.bits, out[size:])

    def decode(self, payload: Tensor, out: Tensor) -> None:  # noqa: D102
        blocks, grid = self.blocks(out.shape), self.grid
        size = self._scales_size(blocks)
        scales = torch.empty(size, dtype=torch.uint8, device=out.device).copy_(payload[:size])
        in_place = out.dtype == torch.float32 and blocks.padded == blocks.numel
        flat = out.view(-1) if in_place else torch.empty(blocks.padded, device=out.device)
        _levels(grid, out.device).unpack(payload[size:], flat[: blocks.numel])
        values = flat.view(blocks.a, blocks.c, blocks.b)
        grid.scale_levels(values, scales.view(grid.scale_dtype).view(blocks.c, -1))
        if not in_place:
            saturating_copy(flat[: blocks.numel].view(out.shape), out)

    def _scales_size(self, blocks: Blocks) -> int:
        return blocks.c * self.grid.scale_bytes


@cache
def _levels(grid: Grid, device: torch.device) -> ValueTable:
    """Return what the codes of ``grid`` stand for before scaling; there are no more of these than grids."""
    return ValueTable(grid.bits, grid.evaluate, device)


def _noise(like: Tensor, key: Key) -> Tensor:
    """Return 16-bit noise, uniform in (-1/2, 1/2), in the shape of ``like``.

    Four values are cut from each 64-bit word: torch makes random floats on a CPU one by one, six times as slowly.
    """
    words = key.words((like.numel() + 3) // 4, like.device)
    return words.view(torch.int16)[: like.numel()].view(like.shape).float().add_(0.5).mul_(2.0**-16)
