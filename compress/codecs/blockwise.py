"""Codecs that send a code for each element and a scale for each block, and the two options that define a block."""

from abc import abstractmethod
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from thinwire.compress.codec import Codec, Key, require_floating
from thinwire.compress.codecs.bits import entropy_with_codes
from thinwire.compress.codecs.granularity import Blocks, Per, blocks_for, resolve_per
from thinwire.compress.codecs.grid import Grid
from thinwire.compress.codecs.quantizer import GridQuantizer, Quantizer


class Blockwise(Codec):
    """A codec whose codes are in units of their block's scale: a quantizer, and the options of q, fp8 and dither."""

    per: Per | None
    """What shares one scale; `row` if neither this nor `group` is given."""
    group: int | None
    """Instead of `per`: how many consecutive elements share one scale."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "per", resolve_per(self, self.per, self.group))

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The size of all scales and of the packed codes, and of outliers; 0 for a tensor without elements."""
        require_floating(self, dtype)
        return self._quantizer.nbytes(shape) if prod(shape) else 0

    def error_bound(self, x: Tensor) -> Tensor:
        """The largest error of each element, in the shape of `x`."""
        return self._quantizer.error_bound(x.detach()) if x.numel() else torch.zeros(x.shape, device=x.device)

    def entropy_bits(self, payload: Tensor, shape: Sequence[int]) -> float:
        """The entropy of the codes, and the full size of the rest."""
        return entropy_with_codes(payload, self._grid.bits, prod(shape))

    @property
    @abstractmethod
    def _grid(self) -> Grid:
        """The values of the codes."""

    @property
    def _quantizer(self) -> Quantizer:
        return GridQuantizer(self._grid, self._blocks)

    def _blocks(self, shape: Sequence[int]) -> Blocks:
        return blocks_for(self.per, self.group, shape)

    def _encode(self, x: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        self._quantizer.encode(x, out, key)

    def _decode(self, payload: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        self._quantizer.decode(payload, out)
