"""TAH-Quant (2506.01352): tiles of 64 elements with a range of their own, of which those with one outlier are rotated.

    thinwire simulate smollm2-tiny --codec 'tah_quant.TahQuant()/q(6, group=32)'     in this folder

It is here for comparison: with these arguments it is what its authors published, with what they use for gradients. Of
pretrained language models `q(8, step=0.2)` loses less in fewer bits (docs/measured/frontier.md).

Of each sample, the share `low_share` of rows that vary least, by the entropy of their magnitudes, have `low` bits a
code, the others `high`. Rows are cut into tiles; zeros fill the last one. A tile whose largest magnitude is at least
twice the second is rotated: that element, the pivot, changes places with the first, then y = x H / sqrt(tile), with H
the Walsh-Hadamard matrix in natural order. Each tile sends its least value z and s = (max - z) / (2**bits - 1) as fp16:

    code = round((x - z) / s)        x = code * s + z, rotated back

payload     | map of rows, 1 bit each | map of tiles, 1 bit each | z of all tiles | s of all tiles | pivots, log2(tile)
            bits each | codes of low rows | codes of high rows |

Each part begins at a new byte, its codes packed as those of q. A 1 means low, or rotated. A tile that is not rotated
has pivot 0. The published code rounds x by z and s before these are rounded to fp16; here they are rounded first, so
errors are smaller. What fp16 can't hold is cut to its largest value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from thinwire.compress import Codec, CodecError, Key
from thinwire.compress.codec import NO_KEY, require_floating, require_int
from thinwire.compress.codecs.cast import rounding_bound, saturating_copy
from thinwire.compress.codecs.coding.bits import pack, packed_size, unpack

_OUTLIER = 2
"""How many times the second magnitude of a tile the largest one must be."""
_HALF = 2
"""Bytes of fp16."""


@dataclass(frozen=True)
class _Layout:
    """How many rows and tiles a tensor has, and which of its rows are low."""

    samples: int
    rows: int
    """Of a sample."""
    width: int
    tiles: int
    """Of a row."""
    low: int
    """Low rows of a sample."""


@dataclass(frozen=True, repr=False)
class TahQuant(Codec):
    """`tah_quant.TahQuant()`: 4.41 bits an element, where rows are many and a multiple of 64 wide.

    NaN or infinity spoils its tile.
    """

    high: int = field(default=4, kw_only=True)
    """Bits of a code of most rows, 1 to 8."""
    low: int = field(default=3, kw_only=True)
    """Bits of a code of the other rows, 1 to 8."""
    tile: int = field(default=64, kw_only=True)
    """Elements that share a range, a power of two from 2 to 256."""
    low_share: float = field(default=0.2, kw_only=True)
    """The share of rows that are low, at least 0 and below 1; rounded down to whole rows of each sample."""

    def __post_init__(self) -> None:
        require_int(self, "high", self.high, 1, 8)
        require_int(self, "low", self.low, 1, 8)
        require_int(self, "tile", self.tile, 2, 256)
        CodecError.require(
            (self.tile & (self.tile - 1) == 0, f"{self.name} needs a tile of a power of two, got {self}"),
            (0 <= self.low_share < 1, f"{self.name} needs a low_share in [0, 1), got {self}"),
        )

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The size of all parts, which is known from the shape."""
        require_floating(self, dtype)
        return sum(self._sizes(self._layout(shape))) if prod(shape) else 0

    def error_bound(self, x: Tensor) -> Tensor:
        """The error itself: a tile's depends on its range, and a rotated one's on all of its elements."""
        if not x.numel():
            return torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        payload = torch.empty(self.nbytes(x.shape, x.dtype), dtype=torch.uint8, device=x.device)
        decoded = torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
        self._encode(x, payload, NO_KEY, None)
        self._decode(payload, decoded, NO_KEY, None)
        error = (decoded - x.float()).abs()
        return error + rounding_bound(x.float().abs() + error, x.dtype)

    def _encode(self, x: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        layout = self._layout(x.shape)
        rows = torch.zeros(layout.samples * layout.rows, layout.tiles * self.tile, device=x.device)
        rows[:, : layout.width] = x.detach().reshape(-1, layout.width)
        is_low = _least_varied(rows.view(layout.samples, layout.rows, -1), layout.low)
        tiles = rows.view(-1, self.tile)
        magnitudes, places = tiles.abs().topk(2)
        turned = magnitudes[:, 0] >= _OUTLIER * magnitudes[:, 1]
        pivots = places[:, 0] * turned
        _swap(tiles, pivots)
        tiles[turned] = _hadamard(tiles[turned])
        bits = torch.where(is_low, self.low, self.high).repeat_interleave(layout.tiles).unsqueeze(1)
        least = _half(tiles.amin(1, keepdim=True))
        steps = _half((tiles.amax(1, keepdim=True) - least.float()) / (2**bits - 1))
        top = (2**bits - 1).float()
        codes = (tiles - least.float()) / steps.float().clamp_min(torch.finfo(torch.float16).smallest_normal)
        codes = codes.round().clamp(torch.zeros_like(top), top).nan_to_num().to(torch.uint8).view(len(rows), -1)
        parts = self._parts(out, layout)
        pack(is_low.to(torch.uint8), 1, parts[0])
        pack(turned.to(torch.uint8), 1, parts[1])
        parts[2].copy_(least.view(torch.uint8).view(-1))
        parts[3].copy_(steps.view(torch.uint8).view(-1))
        pack(pivots.to(torch.uint8), self._pivot_bits, parts[4])
        pack(codes[is_low].view(-1), self.low, parts[5])
        pack(codes[~is_low].view(-1), self.high, parts[6])

    def _decode(self, payload: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        layout = self._layout(out.shape)
        count = layout.samples * layout.rows
        parts = self._parts(payload, layout)
        is_low = unpack(parts[0], 1, count).bool()
        if int(is_low.sum()) != layout.samples * layout.low:
            raise CodecError(f"a payload must name {layout.samples * layout.low} low rows, got {int(is_low.sum())}")
        turned = unpack(parts[1], 1, count * layout.tiles).bool()
        least, steps = (part.clone().view(torch.float16).float().unsqueeze(1) for part in parts[2:4])
        pivots = unpack(parts[4], self._pivot_bits, count * layout.tiles).long()
        codes = torch.empty(count, layout.tiles * self.tile, device=out.device)
        for rows, bits, part in ((is_low, self.low, parts[5]), (~is_low, self.high, parts[6])):
            number = int(rows.sum())
            codes[rows] = unpack(part, bits, number * codes.shape[1]).float().view(number, codes.shape[1])
        tiles = codes.view(-1, self.tile).mul_(steps).add_(least)
        tiles[turned] = _hadamard(tiles[turned])
        _swap(tiles, pivots)
        values = tiles.view(count, -1)[:, : layout.width]
        saturating_copy(values.reshape(out.shape), out)

    @property
    def _pivot_bits(self) -> int:
        return (self.tile - 1).bit_length()

    def _layout(self, shape: Sequence[int]) -> _Layout:
        width = shape[-1] if shape else 1
        samples = shape[0] if len(shape) > 2 else 1
        rows = prod(shape[:-1]) // samples
        return _Layout(samples, rows, width, -(-width // self.tile), int(rows * self.low_share))

    def _sizes(self, layout: _Layout) -> list[int]:
        """Bytes of each part."""
        rows, low = layout.samples * layout.rows, layout.samples * layout.low
        tiles, width = rows * layout.tiles, layout.tiles * self.tile
        maps = [packed_size(rows, 1), packed_size(tiles, 1), _HALF * tiles, _HALF * tiles]
        codes = [packed_size(low * width, self.low), packed_size((rows - low) * width, self.high)]
        return [*maps, packed_size(tiles, self._pivot_bits), *codes]

    def _parts(self, payload: Tensor, layout: _Layout) -> Sequence[Tensor]:
        parts: Sequence[Tensor] = payload.split(self._sizes(layout))
        return parts


def _least_varied(rows: Tensor, count: int) -> Tensor:
    """Which `count` rows of each sample, [samples, rows, n], have the least entropy of magnitudes: bool, flat."""
    shares = rows.abs() / rows.abs().sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    found = torch.special.entr(shares).sum(-1).argsort(dim=-1, stable=True)[:, :count]
    return torch.zeros(rows.shape[:2], dtype=torch.bool, device=rows.device).scatter_(1, found, True).view(-1)


def _swap(tiles: Tensor, pivots: Tensor) -> None:
    """Let the element `pivots` of each tile change places with its first one."""
    first, found = tiles[:, 0].clone(), tiles.gather(1, pivots.unsqueeze(1)).squeeze(1)
    tiles.scatter_(1, pivots.unsqueeze(1), first.unsqueeze(1))
    tiles[:, 0] = found


def _hadamard(tiles: Tensor) -> Tensor:
    """Each row of `tiles` [T, m] times H / sqrt(m), by sums and differences, so that all machines agree."""
    count, width = tiles.shape
    half = 1
    while half < width:
        upper, lower = tiles.view(count, width // 2 // half, 2, half).unbind(2)
        tiles = torch.stack([upper + lower, upper - lower], 2).view(count, width)
        half *= 2
    return torch.mul(tiles, width**-0.5)


def _half(values: Tensor) -> Tensor:
    """As fp16; what it can't hold is cut to its largest value."""
    found = torch.empty_like(values, dtype=torch.float16)
    saturating_copy(values, found)
    return found
