"""The order in which the elements of a stage's parameters fill the rows that replicas exchange.

    FLAT     rows of 512 elements, over the borders of parameters; all rows of a message are one sample for a codec
    TILES    rows of 4096 elements; each row is a sample for a codec

With TILES, the whole tiles of 64 x 64 of every matrix come first, a row each. What is left follows in the order of the
parameters: of a matrix the columns behind the last tile, then the rows below it; anything else as it is. Zeros fill the
last row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

import torch
from torch import Size, Tensor

from thinwire.compress import Method
from thinwire.pipeline.wire.channel import frame_length

SIDE = 64
"""Rows and columns of a tile."""
Flat = Sequence[Tensor | None]
"""Elements in the order of rows: of each parameter those in whole tiles, then of each the rest, then those behind the
last one. None are zeros."""


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

    def frame_bytes(self, rows: int, method: Method) -> int:
        """Bytes of a frame of so many rows, header included."""
        example = torch.empty(self.shape(rows), dtype=torch.float32, device="meta", requires_grad=True)
        return frame_length((example,), method, method)


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
        self._shapes, self.layout = list(shapes.values()), layout
        in_tiles = [_in_tiles(shape) if layout.tiled else 0 for shape in self._shapes]
        rest = [shape.numel() - whole for shape, whole in zip(self._shapes, in_tiles, strict=True)]
        self._sizes = [*in_tiles, *rest]
        self.count = ceil(sum(self._sizes) / layout.row)
        padding = self.count * layout.row - sum(self._sizes)
        names = [*shapes, *shapes, "padding"]
        firsts = [0] * len(shapes) + [*in_tiles, 0]
        self._named = list(zip(names, firsts, strict=True))
        self._stops = list(accumulate([*self._sizes, padding]))

    def flat(self, tensors: Sequence[Tensor | None]) -> Flat:
        """The elements of a tensor for each parameter, in the order of rows; copies of those that lie otherwise."""
        if not self.layout.tiled:
            return [*[None] * len(tensors), *(None if each is None else each.reshape(-1) for each in tensors), None]
        halves = [(None, None) if tensor is None else _split(tensor) for tensor in tensors]
        return [*(whole for whole, _ in halves), *(rest for _, rest in halves), None]

    def room(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Room for all rows, in their order.

        It is that of the given tensors, which are overwritten, where elements lie in this order; else it is new.
        Gradients of parameters that are added as views, as in `a.view(-1) + b.view(-1)`, may lie in one memory.
        """
        holders = Counter(_memory(each) for each in tensors if each is not None)
        taken = [
            None if each is None or self.layout.tiled or not _is_plain(each) or holders[_memory(each)] > 1 else each
            for each in tensors
        ]
        given = [*[None] * len(tensors), *taken, None]
        sizes = [stop - start for start, stop in zip([0, *self._stops], self._stops, strict=False)]
        return [
            torch.empty(size, dtype=torch.float32) if tensor is None else tensor.view(-1)
            for tensor, size in zip(given, sizes, strict=True)
        ]

    def window(self, flat: Flat, rows: range) -> Tensor | None:
        """Some rows where they lie, float32 [len(rows), row] on the host; None if they are of several tensors."""
        (part, within, _), *others = self._overlaps(rows)
        tensor = flat[part]
        if others or tensor is None or not _is_plain(tensor) or tensor.device.type != "cpu":
            return None
        return tensor[within].view(len(rows), -1)

    def gather(self, flat: Flat, rows: range, out: Tensor) -> None:
        """Write some rows of what `flat` returned into `out`, float32 [len(rows), row] on the host."""
        values = out.view(-1)
        for part, within, place in self._overlaps(rows):
            tensor = flat[part]
            values[place].zero_() if tensor is None else values[place].copy_(tensor[within])

    def scatter(self, values: Tensor, rows: range, room: Sequence[Tensor]) -> None:
        """Write rows [len(rows), row] into what `room` returned."""
        for part, within, place in self._overlaps(rows):
            room[part][within].copy_(values.view(-1)[place])

    def read(self, room: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of all parameters from room that is full; they may share memory with it."""
        count = len(self._shapes)
        return [_join(*parts) for parts in zip(room[:count], room[count:-1], self._shapes, strict=True)]

    def pieces(self, rows: range) -> Iterator[tuple[str, slice]]:
        """The parameters that some rows cover: NAME/FIRST, and their elements among those of the rows.

        FIRST counts the elements of a parameter in the order of this layout. The zeros behind the last element are
        named `padding`.
        """
        for part, within, place in self._overlaps(rows):
            name, offset = self._named[part]
            yield f"{name}/{offset + within.start}", place

    def _overlaps(self, rows: range) -> Iterator[tuple[int, slice, slice]]:
        """The parts that some rows cover: which one, its elements, and where they lie among those of the rows."""
        first, last = rows.start * self.layout.row, rows.stop * self.layout.row
        for part in range(bisect_right(self._stops, first), len(self._stops)):
            start = self._stops[part - 1] if part else 0
            begin, end = max(first, start), min(last, self._stops[part])
            if begin < end:
                yield part, slice(begin - start, end - start), slice(begin - first, end - first)
            if end == last:
                return


def _memory(tensor: Tensor) -> int:
    """The address of the memory that it is in, alone or with others."""
    return tensor.untyped_storage().data_ptr()


def _is_plain(tensor: Tensor) -> bool:
    """Whether its elements lie as float32 one behind the other."""
    return tensor.dtype == torch.float32 and tensor.is_contiguous()


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
    x = torch.empty(shape, dtype=torch.float32)
    right = down * (shape[1] - across)
    tiles = whole.view(down // SIDE, across // SIDE, SIDE, SIDE).transpose(1, 2)
    x[:down, :across] = tiles.reshape(down, across)
    x[:down, across:] = rest[:right].view(down, shape[1] - across)
    x[down:] = rest[right:].view(shape[0] - down, shape[1])
    return x
