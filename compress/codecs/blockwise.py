"""Codecs that send a code for each element and a scale for each block, and the options that they share."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from thinwire.compress.codec import Codec, Key, require_floating
from thinwire.compress.codecs.coding.entropy import Coded
from thinwire.compress.codecs.coding.lengths import Code, MayVary, check_code
from thinwire.compress.codecs.fused.cpu import FusedQuantizer
from thinwire.compress.codecs.granularity import Blocks, Per, blocks_for, resolve_per
from thinwire.compress.codecs.grid import Grid
from thinwire.compress.codecs.quantizer import Quantizer

_REACH = 3.0
"""More than the largest magnitude of a decoded element over that of the tensor: normal.py of examples has 2.73 rms."""


class Blockwise(MayVary, Codec):
    """A codec whose codes are in units of their block's scale: a quantizer, and the options of q and fp8."""

    per: Per | None
    """What shares one scale; `row` if neither this nor `group` is given."""
    group: int | None
    """Instead of `per`: how many consecutive elements share one scale."""
    code: Code | None
    """`entropy`: frequent codes take fewer bits, so a payload may be shorter than `nbytes`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "per", resolve_per(self, self.per, self.group))
        check_code(self, self.code, self._codes)

    @property
    def _codes(self) -> Sequence[Code]:
        """What `code` may be."""
        return ("entropy",)

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The size of all scales and of the packed codes; 0 for a tensor without elements.

        With `code` this is the most, and four bytes more.
        """
        require_floating(self, dtype)
        return self._complete.nbytes(shape) if prod(shape) else 0

    def error_bound(self, x: Tensor) -> Tensor:
        """The largest error of each element, in the shape of `x`."""
        if not x.numel():
            return torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return self._quantizer.error_bound(x.detach())

    def error_bound_within(self, magnitudes: Tensor) -> Tensor:
        """The largest error of each element of any tensor of at most these `magnitudes`."""
        if self._most_growth or not magnitudes.numel():
            return (self._most_growth or 1) * self.error_bound(magnitudes)
        magnitudes = magnitudes.detach().float()
        return magnitudes + _REACH * magnitudes.amax()

    @property
    def _most_growth(self) -> int | None:
        """The most by which `error_bound` of a tensor exceeds that of its magnitudes, or of larger ones, if known."""
        return None

    @property
    @abstractmethod
    def _grid(self) -> Grid:
        """The values of the codes."""

    @property
    def _quantizer(self) -> Quantizer:
        return FusedQuantizer(self._grid, self._blocks)

    @cached_property
    def _complete(self) -> Quantizer:
        """The quantizer, with its codes coded if asked for."""
        return Coded(self._quantizer, self._grid.bits) if self.code == "entropy" else self._quantizer

    def _blocks(self, shape: Sequence[int]) -> Blocks:
        return blocks_for(self.per, self.group, shape)

    def _encode(self, x: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        self._complete.encode(x, out, key)

    def _decode(self, payload: Tensor, out: Tensor, key: Key, shared: Tensor | None) -> None:
        self._complete.decode(payload, out)
