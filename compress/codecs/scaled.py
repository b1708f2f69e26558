"""Codecs with one bf16 scale for each block of the tensor, and the two options that say what a block is.

payload     | scale of block 0, bf16 | .. | scale of block C-1 | codes, packed |
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import get_args

import torch
from torch import Tensor

from thinwire.compress.codec import Codec, CodecError, Key, require_choice, require_floating, require_int, tensor_bytes
from thinwire.compress.codecs.bits import ValueTable, entropy_with_codes, pack, packed_size
from thinwire.compress.codecs.cast import rounding_bound, saturating_copy
from thinwire.compress.codecs.granularity import Blocks, Per, blocks_of_group, blocks_per


@dataclass(frozen=True, repr=False)
class Scaled(Codec):
    """A codec whose codes count in units of their block's scale.

    Values come as float32 [A, C, B], one block for each index of C (see granularity.py); a decoder multiplies what a
    code stands for by its block's scale, and does nothing else.
    """

    per: Per | None = field(default=None, kw_only=True)
    """What shares one scale; ``row`` if neither this nor ``group`` is given."""
    group: int | None = field(default=None, kw_only=True)
    """Instead of ``per``: how many consecutive elements share one scale."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "per", resolve_per(self, self.per, self.group))

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the size of all scales and of the packed codes; 0 for a tensor without elements."""
        require_floating(self, dtype)
        n = prod(shape)
        return 2 * self._blocks(shape).c + packed_size(n, self._code_bits) if n else 0

    def error_bound(self, x: Tensor) -> Tensor:
        """Return the largest error of each element, in the shape of ``x``."""
        if not x.numel():
            return torch.zeros(x.shape, device=x.device)
        blocks = self._blocks(x.shape)
        values = blocks.view(x.detach().float())
        bound = self._bound(values.abs(), self._block_units(self._measure(values)))
        bound += rounding_bound(values.abs() + bound, x.dtype)
        return bound.view(-1)[: blocks.numel].view(x.shape)

    def entropy_bits(self, payload: Tensor, shape: Sequence[int]) -> float:
        """The entropy of the codes, and all beside them as it is sent."""
        return entropy_with_codes(payload, self._code_bits, prod(shape))

    @property
    @abstractmethod
    def _code_bits(self) -> int:
        """How many bits a code has."""

    @abstractmethod
    def _scales(self, largest: Tensor) -> Tensor:
        """Return the scales of blocks whose largest magnitudes are ``largest``, float32 [C]: bf16 [C]."""

    def _units(self, scales: Tensor) -> Tensor:
        """Return what a code's value is multiplied by in blocks of these scales, float32 of any shape."""
        return scales

    @abstractmethod
    def _codes(self, values: Tensor, units: Tensor, key: Key) -> Tensor:
        """Return the codes of ``values`` [A, C, B] in ``units``, float32 [C, 1], as uint8 of the same shape."""

    @abstractmethod
    def _table(self) -> Tensor:
        """Return what each code stands for before scaling: float32 [2**code_bits]."""

    @abstractmethod
    def _bound(self, magnitude: Tensor, units: Tensor) -> Tensor:
        """Return how far decoded values are from ones of ``magnitude``, float32 [A, C, B], in the same shape."""

    def _encode(self, x: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        blocks = self._blocks(x.shape)
        values = blocks.view(x.float())
        scales = self._measure(values)
        codes = self._codes(values, self._block_units(scales), key).view(-1)[: blocks.numel]
        out[: 2 * blocks.c] = tensor_bytes(scales)
        pack(codes, self._code_bits, out[2 * blocks.c :])

    def _decode(self, payload: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        blocks = self._blocks(out.shape)
        scales = torch.empty(blocks.c, dtype=torch.bfloat16, device=out.device)
        tensor_bytes(scales).copy_(payload[: 2 * blocks.c])
        in_place = out.dtype == torch.float32 and blocks.padded == blocks.numel
        flat = out.view(-1) if in_place else torch.empty(blocks.padded, device=out.device)
        _points(self, out.device).unpack(payload[2 * blocks.c :], flat[: blocks.numel])
        values = flat.view(blocks.a, blocks.c, blocks.b)
        values.mul_(self._block_units(scales))
        if not in_place:
            saturating_copy(flat[: blocks.numel].view(out.shape), out)

    def _measure(self, values: Tensor) -> Tensor:
        return self._scales(torch.maximum(values.amax((0, 2)), values.amin((0, 2)).neg_()))

    def _block_units(self, scales: Tensor) -> Tensor:
        return self._units(scales.float()).unsqueeze(1)

    def _blocks(self, shape: Sequence[int]) -> Blocks:
        return blocks_for(self.per, self.group, shape)


@cache
def _points(codec: Scaled, device: torch.device) -> ValueTable:
    """Return what the codes of ``codec`` stand for before scaling; a run has few codecs."""
    table = codec._table().to(device)

    def evaluate(codes: Tensor) -> None:
        torch.index_select(table, 0, codes.view(-1).int(), out=codes.view(-1))

    return ValueTable(codec._code_bits, evaluate, device)


def resolve_per(codec: Codec, per: Per | None, group: int | None) -> Per | None:
    """Return what ``per`` means beside ``group``; raise :class:`CodecError` for what neither can be."""
    if group is not None:
        require_int(codec, "group", group, 1, None)
        if per is not None:
            raise CodecError(f"{codec.name} takes per or group, not both, got per={per!r} and group={group}")
        return None
    if per is None:
        return "row"
    require_choice(codec, "per", per, get_args(Per))
    return per


def blocks_for(per: Per | None, group: int | None, shape: Sequence[int]) -> Blocks:
    """Return the blocks of a non-empty tensor of ``shape``, one of ``per`` and ``group`` being None."""
    if group is not None:
        return blocks_of_group(group, shape)
    assert per is not None
    return blocks_per(per, shape)


def bfloat16_above(x: Tensor) -> Tensor:
    """Return ``x``, float32 and not negative, rounded up to bf16."""
    nearest = x.bfloat16()
    return torch.where(nearest < x, torch.nextafter(nearest, torch.full_like(nearest, torch.inf)), nearest)
