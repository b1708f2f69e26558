"""Which elements share a scale: every granularity is one three-dimensional view of the tensor.

The view is [outer, count, inner]: `count` blocks with a scale each. A block holds the elements of all outer and inner
indices:

    shape       0-D [], n = 1   1-D [n]      2-D, 3-D [N, .., L]   4-D and above [N, M, ..]
    tensor      [1, 1, 1]       [1, 1, n]    [1, 1, n]             [1, 1, n]
    sample      [1, 1, 1]       [1, n, 1]    [1, N, n/N]           [1, N, n/N]
    row         [1, 1, 1]       [1, 1, n]    [1, n/L, L]           [1, N*M, n/(N*M)]   one sample's channel map
    channel     [1, 1, 1]       [1, n, 1]    [n/L, L, 1]           [N, M, n/(N*M)]
    group=G     [1, ceil(n/G), G] of the flattened tensor, with a padded last block
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Literal, get_args

import torch
from torch import Tensor

from thinwire.compress.codec import Codec, CodecError, require_choice, require_int

Per = Literal["tensor", "sample", "row", "channel"]


@dataclass(frozen=True)
class Blocks:
    """A tensor's elements seen as [outer, count, inner]: `count` blocks of outer * inner elements each."""

    numel: int
    """Elements of the tensor; the view may have more."""
    outer: int
    count: int
    inner: int

    @property
    def padded(self) -> int:
        """The number of elements in the view."""
        return self.outer * self.count * self.inner

    def view(self, x: Tensor) -> Tensor:
        """`x` as [outer, count, inner], padded with copies of its last element, which change no block's range."""
        flat = x.reshape(-1)
        if self.padded > self.numel:
            flat = torch.cat([flat, flat[-1:].expand(self.padded - self.numel)])
        return flat.view(self.outer, self.count, self.inner)

    def spread(self, values: Tensor, shape: Sequence[int]) -> Tensor:
        """`values`, which broadcast to the view, as a tensor of `shape`, without the padding."""
        spread = values.expand(self.outer, self.count, self.inner).reshape(-1)
        return spread[: self.numel].view(tuple(shape))


def resolve_per(codec: Codec, per: Per | None, group: int | None) -> Per | None:
    """The value of `per`: `row` if neither is given, None if `group` is.

    Raises CodecError if a value is not allowed, or both are given.
    """
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
    """The blocks of a non-empty tensor of `shape`; either `per` or `group` is None."""
    if group is not None:
        return blocks_of_group(group, shape)
    assert per is not None
    return blocks_per(per, shape)


def blocks_per(per: Per, shape: Sequence[int]) -> Blocks:
    """The blocks of a non-empty tensor of `shape` for one of the named granularities."""
    numel = prod(shape)
    return Blocks(numel, *_VIEWS[per](tuple(shape), numel)) if shape else Blocks(numel, 1, 1, 1)


def blocks_of_group(group: int, shape: Sequence[int]) -> Blocks:
    """The blocks of `group` consecutive elements of a non-empty tensor of `shape`."""
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
