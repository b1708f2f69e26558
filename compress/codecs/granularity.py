"""How far one scale reaches: every granularity is one three-dimensional view of the tensor.

A tensor is seen as [A, C, B], and each index of C is one block with a scale of its own, taken over A and B:

    shape       0-D [], n = 1   1-D [n]      2-D, 3-D [N, .., L]   4-D and above [N, M, ..]
    tensor      [1, 1, 1]       [1, 1, n]    [1, 1, n]             [1, 1, n]
    sample      [1, 1, 1]       [1, n, 1]    [1, N, n/N]           [1, N, n/N]
    row         [1, 1, 1]       [1, 1, n]    [1, n/L, L]           [1, N*M, n/(N*M)]   one sample's channel map
    channel     [1, 1, 1]       [1, n, 1]    [n/L, L, 1]           [N, M, n/(N*M)]
    group=G     [1, ceil(n/G), G] of the flattened tensor, its last block filled up
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

Per = Literal["tensor", "sample", "row", "channel"]


@dataclass(frozen=True)
class Blocks:
    """A tensor of ``numel`` elements seen as [a, c, b]: c blocks of a*b elements; a*c*b may exceed ``numel``."""

    numel: int
    a: int
    c: int
    b: int

    @property
    def padded(self) -> int:
        """The number of elements in the view."""
        return self.a * self.c * self.b

    def view(self, x: Tensor) -> Tensor:
        """Return ``x`` as [a, c, b], the missing elements copies of its last one, which change no block's range."""
        flat = x.reshape(-1)
        if self.padded > self.numel:
            flat = torch.cat([flat, flat[-1:].expand(self.padded - self.numel)])
        return flat.view(self.a, self.c, self.b)

    def spread(self, per_block: Tensor, shape: Sequence[int]) -> Tensor:
        """Return one number a block, [c], as a tensor of ``shape`` that gives each element its block's."""
        return per_block.view(1, -1, 1).expand(self.a, self.c, self.b).reshape(-1)[: self.numel].view(tuple(shape))


def blocks_per(per: Per, shape: Sequence[int]) -> Blocks:
    """Return the blocks of a non-empty tensor of ``shape`` for one of the named granularities."""
    numel = prod(shape)
    return Blocks(numel, *_VIEWS[per](tuple(shape), numel)) if shape else Blocks(numel, 1, 1, 1)


def blocks_of_group(group: int, shape: Sequence[int]) -> Blocks:
    """Return the blocks of ``group`` consecutive elements of a non-empty tensor of ``shape``."""
    numel = prod(shape)
    size = min(group, numel)
    return Blocks(numel, 1, -(-numel // size), size)


def _per_row(shape: tuple[int, ...], numel: int) -> tuple[int, int, int]:
    if len(shape) == 1:
        return 1, 1, numel
    rows = shape[0] * shape[1] if len(shape) >= 4 else numel // shape[-1]
    return 1, rows, numel // rows


def _per_channel(shape: tuple[int, ...], numel: int) -> tuple[int, int, int]:
    if len(shape) >= 4:
        return shape[0], shape[1], numel // (shape[0] * shape[1])
    return numel // shape[-1], shape[-1], 1


_VIEWS: Mapping[Per, Callable[[tuple[int, ...], int], tuple[int, int, int]]] = MappingProxyType(
    {
        "tensor": lambda shape, numel: (1, 1, numel),
        "sample": lambda shape, numel: (1, shape[0], numel // shape[0]),
        "row": _per_row,
        "channel": _per_channel,
    }
)
