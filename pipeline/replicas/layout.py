"""The order in which the elements of a stage's parameters fill the rows that replicas exchange.

    FLAT     rows of 512 elements, over the borders of parameters; all rows of a message are one sample for a codec
    TILES    rows of 4096 elements; each row is a sample for a codec

With TILES, the whole tiles of 64 x 64 of every matrix come first, a row each. What is left follows in the order of the
parameters: of a matrix the columns behind the last tile, then the rows below it; anything else as it is. Zeros fill the
last row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

import torch
from torch import Size, Tensor

SIDE = 64
"""Rows and columns of a tile."""


@dataclass(frozen=True)
class Layout:
    """How rows are made from parameters, and what a codec makes of rows."""

    row: int
    """Elements of a row."""
    tiled: bool
    """Whether the tiles of matrices come first, and each row is a sample."""

    def shape(self, rows: int) -> tuple[int, ...]:
        """The shape of so many rows as a codec gets them: [1, rows, row], or [rows, row] if a row is a sample."""
        return (rows, self.row) if self.tiled else (1, rows, self.row)


FLAT = Layout(row=512, tiled=False)
"""A codec with a scale for each row has one for 512 elements, as the code of 2206.01299."""
TILES = Layout(row=SIDE * SIDE, tiled=True)
"""A sparse codec keeps its share of each tile, as 2508.15706 does."""


class StageRows:
    """The rows of a stage.

    Args:
        shapes: of the parameters by name, in an order that all replicas have.
        layout: how rows are made from them.
    """

    def __init__(self, shapes: Mapping[str, Size], layout: Layout) -> None:
        self._shapes, self._layout = list(shapes.values()), layout
        in_tiles = [_in_tiles(shape) if layout.tiled else 0 for shape in self._shapes]
        rest = [shape.numel() - whole for shape, whole in zip(self._shapes, in_tiles, strict=True)]
        self._sizes = [*in_tiles, *rest]
        self.count = ceil(sum(self._sizes) / layout.row)
        padding = self.count * layout.row - sum(self._sizes)
        names = [*shapes, *shapes, "padding"]
        firsts = [0] * len(shapes) + [*in_tiles, 0]
        self._named = list(zip(names, firsts, [*self._sizes, padding], strict=True))

    def fill(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Float32 [count, row] on the host, with the elements of a tensor for each parameter, or zeros."""
        rows = torch.zeros(self.count, self._layout.row)
        parts = self._parts(rows)
        for index, tensor in enumerate(tensors):
            if tensor is not None:
                whole, rest = _split(tensor) if self._layout.tiled else (None, tensor.reshape(-1))
                parts[len(tensors) + index].copy_(rest)
                if whole is not None:
                    parts[index].copy_(whole)
        return rows

    def read(self, rows: Tensor) -> list[Tensor]:
        """The tensors of all parameters from rows; they may share memory with the rows."""
        parts, count = self._parts(rows), len(self._shapes)
        return [
            _join(parts[index], parts[count + index], shape) if self._layout.tiled else parts[count + index].view(shape)
            for index, shape in enumerate(self._shapes)
        ]

    def pieces(self, rows: range) -> Iterator[tuple[str, slice]]:
        """The parameters that some rows cover: NAME/FIRST, and their elements among those of the rows.

        FIRST counts the elements of a parameter in the order of this layout. The zeros behind the last element are
        named `padding`.
        """
        first, last = rows.start * self._layout.row, rows.stop * self._layout.row
        stops = accumulate(size for _, _, size in self._named)
        for (name, offset, size), stop in zip(self._named, stops, strict=True):
            start = stop - size
            if (begin := max(first, start)) < (end := min(last, stop)):
                yield f"{name}/{offset + begin - start}", slice(begin - first, end - first)

    def _parts(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Views of what is in tiles of each parameter, then of the rest of each."""
        parts: tuple[Tensor, ...] = rows.view(-1)[: sum(self._sizes)].split(self._sizes)
        return parts


def _in_tiles(shape: Size) -> int:
    """The elements in whole tiles."""
    if len(shape) != 2:
        return 0
    down, across = (size // SIDE * SIDE for size in shape)
    return down * across


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """The elements in whole tiles, a tile behind the other, and the rest."""
    if not _in_tiles(x.shape):
        return x.new_empty(0), x.reshape(-1)
    down, across = (size // SIDE * SIDE for size in x.shape)
    tiles = x[:down, :across].reshape(down // SIDE, SIDE, across // SIDE, SIDE).transpose(1, 2)
    return tiles.reshape(-1), torch.cat([x[:down, across:].reshape(-1), x[down:].reshape(-1)])


def _join(whole: Tensor, rest: Tensor, shape: Size) -> Tensor:
    """The tensor whose parts these are."""
    if not len(whole):
        return rest.view(shape)
    down, across = (size // SIDE * SIDE for size in shape)
    x = torch.empty(shape)
    right = down * (shape[1] - across)
    tiles = whole.view(down // SIDE, across // SIDE, SIDE, SIDE).transpose(1, 2)
    x[:down, :across] = tiles.reshape(down, across)
    x[:down, across:] = rest[:right].view(down, shape[1] - across)
    x[down:] = rest[right:].view(shape[0] - down, shape[1])
    return x
