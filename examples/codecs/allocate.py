"""Groups of larger scale get more bits, under a total that both ends know in advance.

    thinwire simulate quickstart --codec 'q(8)/allocate.Allocate(4, group=64)'     in this folder

It helps where groups are of unlike size and large errors matter more than small ones: gradients. Those of a ResNet gain
8 dB at `group=32` over `q(4, group=32)`, in the same bytes. No training has measured this yet, and it takes more than
twice the time.

payload     | scales of all groups | codes of the groups of 8 bits | of 7 bits | .. | of 1 bit |

A group of scale s at b bits loses about (s / 2**b)**2 an element. The sum over all groups is least where all lose the
same, so twice the scale is worth one bit more. Both ends compute the bits of each group from the scales, as integers:

    L = the bf16 scale without its sign, seen as an integer, 0 if it is not finite: 128 more for twice the scale

Every group has one bit. Its second bit is worth L - 2 * 128, its third L - 3 * 128, and so on up to the eighth. Of
these further bits the (bits - 1) * C that are worth most are given, of equals those of the first groups.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from thinwire.compress.codec import CodecError, Key
from thinwire.compress.codecs.blockwise import Blockwise
from thinwire.compress.codecs.cast import rounding_bound, saturating_copy
from thinwire.compress.codecs.coding.bits import pack, packed_size, unpack
from thinwire.compress.codecs.granularity import Blocks
from thinwire.compress.codecs.grid import AbsMaxGrid, Grid
from thinwire.compress.codecs.quantizer import Quantizer

LEAST, MOST = 1, 8
"""The bits that a group may have."""
EIGHT = 8
"""Codes of a multiple of this many elements fill whole bytes."""
_DOUBLE = 1 << 7
"""How much larger the integer of a bf16 is for twice the number."""
_INFINITE = 0x7F80
"""The integer of the bf16 infinity; NaN is beyond."""
_PART = 1 << 20
"""Elements handled at a time, so that what is made of them stays in a cache."""


@dataclass(frozen=True, repr=False)
class Allocate(Blockwise):
    """As `q(bits, group=group, grid="midrise")`, but groups have more bits or fewer, and `bits` on average."""

    per = None
    code = None

    bits: int
    """The average bits a code, 2 to 7."""
    group: int
    """How many consecutive elements share one scale: a multiple of 8."""

    def __post_init__(self) -> None:
        if self.bits not in range(LEAST + 1, MOST) or self.group < 1 or self.group % EIGHT:
            raise CodecError(
                f"{self.name} needs {LEAST + 1} to {MOST - 1} bits and a group of a multiple of {EIGHT}, got {self}"
            )

    @property
    def _grid(self) -> Grid:
        return AbsMaxGrid(self.bits, stochastic=False)

    @property
    def _quantizer(self) -> Quantizer:
        return Allocated(self._grid, self._blocks)


@dataclass(frozen=True)
class Allocated(Quantizer):
    """A quantizer that gives each group bits of its own."""

    grid: Grid
    """The grid of codes of the average number of bits; its scales must not depend on that."""
    blocks: Callable[[Sequence[int]], Blocks]
    """Gives the groups of a tensor of this shape: of a multiple of 8 elements each, or one group."""

    def nbytes(self, shape: Sequence[int]) -> int:
        """The size of all scales and of the packed codes, those of the last group's padding included."""
        blocks = self.blocks(shape)
        codes = packed_size(blocks.count * blocks.inner, self.grid.bits)
        return self.grid.scales_size(blocks.count) + codes

    def encode(self, x: Tensor, out: Tensor, key: Key) -> None:
        """Write each group's scale, then the codes."""
        blocks, grid, flat = self.blocks(x.shape), self.grid, x.reshape(-1)
        parts = blocks.parts(_PART) if blocks.are_whole(_PART) else [blocks.whole]
        elements = ((part, flat[part.start : part.stop].float()) for part in parts)
        measured = torch.cat([grid.measure(part.padded(some)) for part, some in elements])
        out[: grid.scales_size(blocks.count)] = grid.pack_scales(measured)
        scales, packed = self._parts(out, blocks)
        groups = blocks.view(flat).squeeze(0)
        for piece in self._pieces(scales, blocks):
            values = groups.index_select(0, piece.groups).float()
            codes = piece.grid.codes(values.unsqueeze(0), scales[piece.groups], None)
            pack(codes.view(-1), piece.grid.bits, packed[piece.place])

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the values of the codes, scaled, into `out`."""
        blocks = self.blocks(out.shape)
        scales, packed = self._parts(payload, blocks)
        in_place = out.dtype == torch.float32 and blocks.count * blocks.inner == blocks.numel
        whole = (blocks.count, blocks.inner)
        groups = out.view(whole) if in_place else torch.empty(whole, dtype=torch.float32, device=out.device)
        for piece in self._pieces(scales, blocks):
            values = torch.empty(len(piece.groups), blocks.inner, dtype=torch.float32, device=out.device)
            codes = unpack(packed[piece.place], piece.grid.bits, values.numel())
            piece.grid.evaluate(values.view(-1).copy_(codes))
            piece.grid.scale_levels(values.unsqueeze(0), scales[piece.groups])
            groups.index_copy_(0, piece.groups, values)
        if not in_place:
            saturating_copy(groups.view(-1)[: out.numel()], out.view(-1))

    def error_bound(self, x: Tensor) -> Tensor:
        """The bound of each group's grid, plus the rounding of the tensor's dtype."""
        blocks, grid = self.blocks(x.shape), self.grid
        values = blocks.view(x.float())
        scales = grid.unpack_scales(grid.pack_scales(grid.measure(values)), blocks.count)
        bound = torch.empty_like(values)
        for piece in self._pieces(scales, blocks):
            error, largest = piece.grid.bound(values[:, piece.groups], scales[piece.groups])
            bound[:, piece.groups] = error + rounding_bound(largest, x.dtype)
        return blocks.spread(bound, x.shape)

    def _parts(self, payload: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """The scales in a payload, and its codes."""
        size = self.grid.scales_size(blocks.count)
        return self.grid.unpack_scales(payload[:size], blocks.count), payload[size:]

    def _pieces(self, scales: Tensor, blocks: Blocks) -> Iterator["EqualGroups"]:
        """Yield all groups, those of most bits first, a few at a time."""
        bits, start = allocated_bits(scales, self.grid.bits), 0
        for width, count in reversed(list(enumerate(bits.bincount().tolist()))):
            if not count:
                continue
            for groups in (bits == width).nonzero().squeeze(1).split(max(1, _PART // blocks.inner)):
                size = packed_size(len(groups) * blocks.inner, width)
                yield EqualGroups(replace(self.grid, bits=width), groups, slice(start, start + size))
                start += size


@dataclass(frozen=True)
class EqualGroups:
    """The groups that have one number of bits."""

    grid: Grid
    groups: Tensor
    """Which ones, ascending: int64 [k]."""
    place: slice
    """Where their codes lie among those of a payload."""


def allocated_bits(scales: Tensor, bits: int) -> Tensor:
    """The bits of each group, given the groups' scales [C, 1] and the bits that they have on average: int32 [C]."""
    numbers = scales.view(-1).bfloat16().view(torch.int16).int() & 0x7FFF
    numbers.masked_fill_(numbers >= _INFINITE, 0)
    granted = (bits - LEAST) * len(numbers)
    least = _least_worth(numbers, granted)
    # those worth more than the least, then the first that are worth as much
    allocated = _reaching(numbers, least + 1)
    left = granted - int(allocated.sum()) + LEAST * len(numbers)
    allocated[(_reaching(numbers, least) > allocated).nonzero()[:left]] += 1
    return allocated


def _reaching(numbers: Tensor, worth: int) -> Tensor:
    """How many bits groups have if they get all that are worth no less than this."""
    return ((numbers - worth) >> 7).clamp_(LEAST, MOST)


def _least_worth(numbers: Tensor, granted: int) -> int:
    """What the last of the `granted` further bits is worth that are worth most."""
    ordered, further = np.sort(numbers.cpu().numpy()), np.arange(LEAST + 1, MOST + 1) * _DOUBLE
    low, high = int(ordered[0]) - MOST * _DOUBLE, int(ordered[-1])
    while low < high:
        middle = (low + high + 1) // 2
        less = int(np.searchsorted(ordered, middle + further).sum())
        if len(further) * len(ordered) - less >= granted:
            low = middle
        else:
            high = middle - 1
    return low
