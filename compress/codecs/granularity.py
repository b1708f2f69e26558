"""Which elements share a scale: every granularity is one three-dimensional view of the tensor.

The view is [outer, count, inner]: `count` blocks with a scale each. A block holds the elements of all outer and inner
indices:

    shape       0-D [], n = 1   1-D [n]      2-D, 3-D [N, .., L]   4-D and above [N, M, ..]
    tensor      [1, 1, 1]       [1, 1, n]    [1, 1, n]             [1, 1, n]
    sample      [1, 1, 1]       [1, n, 1]    [1, N, n/N]           [1, N, n/N]
    row         [1, 1, 1]       [1, 1, n]    [1, n/L, L]           [1, N*M, n/(N*M)]   one sample's channel map
    channel     [1, 1, 1]       [1, n, 1]    [n/L, L, 1]           [N, M, n/(N*M)]
    group=G     [1, ceil(n/G), G] of the flattened tensor, with a padded last block

Work on a large tensor goes by parts that fit a cache: views of the same kind, of elements that follow each other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from types import MappingProxyType
from typing import Literal, get_args

import torch
from torch import Tensor

from thinwire.compress.codec import Codec, CodecError, require_choice, require_int

Per = Literal["tensor", "sample", "row", "channel"]


_WHOLE_BYTES = 8
"""Codes of this many elements fill whole bytes at any width, and so do the random numbers for them."""


@dataclass(frozen=True)
class BlockRange:
    """Elements of a tensor that follow each other, as [outer, count, inner]: those of some blocks, whole or not."""

    start: int
    """The first element, a multiple of 8."""
    stop: int
    """The end of the elements; the view may have more."""
    shape: tuple[int, int, int]
    blocks: slice
    """Which of the tensor's blocks."""

    @property
    def is_padded(self) -> bool:
        """Whether the view has more elements than the tensor."""
        return prod(self.shape) > self.stop - self.start

    def padded(self, elements: Tensor) -> Tensor:
        """Its elements, padded with copies of the last one, which change no block's range."""
        if self.is_padded:
            elements = torch.cat([elements, elements[-1:].expand(prod(self.shape) - len(elements))])
        return elements.view(self.shape)

    def measured(self, elements: Tensor, measure: Callable[[Tensor], Tensor]) -> Tensor:
        """What `measure` finds for each block [outer, count, inner] of its elements [n]: [count, ..].

        A shorter last block is measured alone, because copies of one element would change a mean.
        """
        if not self.is_padded:
            return measure(elements.view(self.shape))
        _, count, inner = self.shape
        whole, rest = elements.tensor_split([(count - 1) * inner])
        last = measure(rest.view(1, 1, -1))
        return torch.cat([measure(whole.view(1, count - 1, inner)), last]) if len(whole) else last


@dataclass(frozen=True)
class Blocks:
    """A tensor's elements seen as [outer, count, inner]: `count` blocks of outer * inner elements each."""

    numel: int
    """Elements of the tensor; the view may have more."""
    outer: int
    count: int
    inner: int

    def view(self, x: Tensor) -> Tensor:
        """`x` as [outer, count, inner], padded with copies of its last element, which change no block's range."""
        return self.whole.padded(x.reshape(-1))

    @property
    def whole(self) -> BlockRange:
        """All of the tensor as one part."""
        return BlockRange(0, self.numel, (self.outer, self.count, self.inner), slice(0, self.count))

    def parts(self, size: int) -> Iterator[BlockRange]:
        """Yield the tensor in parts of about `size` elements, a multiple of 8."""
        if not self.are_whole(size):
            yield from self._parts_of_blocks(size)
            return
        step = _aligned(size, self.inner)
        for first in range(0, self.count, step):
            blocks = slice(first, min(first + step, self.count))
            start, stop = (min(block * self.inner, self.numel) for block in (blocks.start, blocks.stop))
            yield BlockRange(start, stop, (1, blocks.stop - first, self.inner), blocks)

    def are_whole(self, size: int) -> bool:
        """Whether blocks are whole in parts of `size`: none lies in two."""
        return self.outer == 1 and (self.inner <= size or (self.count > 1 and self.inner % _WHOLE_BYTES > 0))

    def _parts_of_blocks(self, size: int) -> Iterator[BlockRange]:
        """Yield parts of which each has elements of all blocks, or of one."""
        if self.outer > 1:
            row = self.count * self.inner
            step = _aligned(size, row)
            for first in range(0, self.outer, step):
                outer = min(step, self.outer - first)
                yield BlockRange(
                    first * row, (first + outer) * row, (outer, self.count, self.inner), slice(0, self.count)
                )
            return
        for block in range(self.count):
            for start in range(block * self.inner, min((block + 1) * self.inner, self.numel), size):
                stop = min(start + size, (block + 1) * self.inner, self.numel)
                yield BlockRange(start, stop, (1, 1, stop - start), slice(block, block + 1))

    def spread(self, values: Tensor, shape: Sequence[int]) -> Tensor:
        """`values`, which broadcast to the view, as a tensor of `shape`, without the padding."""
        spread = values.expand(self.outer, self.count, self.inner).reshape(-1)
        return spread[: self.numel].view(tuple(shape))


def _aligned(size: int, row: int) -> int:
    """How many rows of `row` elements make a part of about `size`: its codes must fill whole bytes."""
    fewest = _WHOLE_BYTES // gcd(_WHOLE_BYTES, row)
    return max(fewest, size // row // fewest * fewest)


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


@lru_cache(maxsize=4096)
def blocks_for(per: Per | None, group: int | None, shape: Sequence[int]) -> Blocks:
    """The blocks of a non-empty tensor of `shape`: of one of the named kinds, or `group` consecutive elements each."""
    if group is None:
        assert per is not None
        return blocks_per(per, shape)
    numel = prod(shape)
    size = min(group, numel)
    return Blocks(numel, 1, -(-numel // size), size)


def blocks_per(per: Per, shape: Sequence[int]) -> Blocks:
    """The blocks of a non-empty tensor of `shape` for one of the named granularities."""
    numel = prod(shape)
    return Blocks(numel, *_VIEWS[per](tuple(shape), numel)) if shape else Blocks(numel, 1, 1, 1)


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
