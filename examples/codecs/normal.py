"""Levels that fit a Gaussian, the best that 1 to 4 bits an element allow without coding several at once.

    thinwire simulate resnet-tiny --codec 'normal.Normal(3, per="sample")/q(4)'     in this folder

It helps where values are about Gaussian and bits are few: rows that are rotated first (`rotated.py`), or a ResNet's
samples, where 2 bits cost 0.06 of loss and those of `q` 0.09 to 0.25. Massive values, as of pretrained language models,
are cut off.

payload     | scale of block 0, bf16 | .. | scale of block C-1 | codes, packed |

The scale is the block's root mean square. The levels are those of Lloyd and Max for a Gaussian of variance 1: each is
the mean of the values that it stands for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor

from thinwire.compress.codec import require_int
from thinwire.compress.codecs.blockwise import Blockwise
from thinwire.compress.codecs.coding.lengths import Code
from thinwire.compress.codecs.fused.arithmetic import nonzero
from thinwire.compress.codecs.granularity import Per
from thinwire.compress.codecs.grid import Grid, PointGrid, signed_codes
from thinwire.errors import attempt

LEVELS: Mapping[int, tuple[float, ...]] = MappingProxyType(
    {
        1: (0.797885,),
        2: (0.452780, 1.510418),
        3: (0.245094, 0.756005, 1.343909, 2.151946),
        4: (0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590),
    }
)
"""The positive levels by bits; the others are the same with a minus."""

_BENDS: Mapping[int, tuple[float, float]] = MappingProxyType(
    {1: (1.0, 0.0), 2: (1 / 0.981599, 0.0), 3: (2.028472, 0.0594638), 4: (3.891176, 0.0578591)}
)
"""a and c by bits: a * t / (1 + c * t**2) is an integer where t is halfway between two levels, within 0.2 % of t."""
_TURN = 3.0
"""Beyond this it would grow no more; it has passed the last of those integers."""

_SMALLEST_SCALE = 2.0**-118
_OVER_BLOCK = (0, 2)
_MOST_IN_FLOAT32 = 1 << 16
_LEAST_NORM, _LARGEST_NORM = 2.0**-45, 2.0**60


@dataclass(frozen=True, repr=False)
class Normal(Blockwise):
    """`normal.Normal(bits)`: each element becomes the nearest of 2**bits levels for a Gaussian, times a block's scale.

    The scale is the root mean square of the block, rounded to bf16. On Gaussian blocks the signal to noise is 4.4, 9.3,
    14.6 and 20.2 dB at 1 to 4 bits. There is no useful bound for single elements: the largest level is 2.73 scales at 4
    bits, and everything beyond is cut to it.

    A block whose scale would be below 2**-118 is decoded as zeros. NaN or infinity makes its whole block not finite.
    """

    bits: int
    """Bits a code, 1 to 4."""

    per: Per | None = field(default=None, kw_only=True)
    """What shares one scale; `row` if neither this nor `group` is given."""
    group: int | None = field(default=None, kw_only=True)
    """Instead of `per`: how many consecutive elements share one scale."""
    code: Code | None = field(default=None, kw_only=True)
    """`entropy`: frequent codes take fewer bits, so a payload may be shorter than `nbytes`."""

    def __post_init__(self) -> None:
        attempt(
            lambda: require_int(self, "bits", self.bits, 1, max(LEVELS)),
            super().__post_init__,
        )

    @property
    def _grid(self) -> Grid:
        return NormalGrid(self.bits, stochastic=False)


@dataclass(frozen=True)
class NormalGrid(PointGrid):
    """The levels of Lloyd and Max."""

    def measure(self, values: Tensor) -> Tensor:
        """The root mean square of each block, as bf16: [count, 1]."""
        n = values.shape[0] * values.shape[2]
        # in float32 eight times as fast, but its squares may overflow, and sums of many grow inexact
        dtype = torch.float32 if values.is_cpu and n <= _MOST_IN_FLOAT32 else torch.float64
        norm: Tensor = torch.linalg.vector_norm(values, dim=_OVER_BLOCK, dtype=dtype)
        if dtype == torch.float32 and not bool(((norm > _LEAST_NORM) & (norm < _LARGEST_NORM)).all()):
            norm = torch.linalg.vector_norm(values, dim=_OVER_BLOCK, dtype=torch.float64)
        mean: Tensor = norm * n**-0.5
        scales = mean.bfloat16().unsqueeze(1)
        return scales.masked_fill_(scales < _SMALLEST_SCALE, 0.0)

    def codes(self, values: Tensor, scales: Tensor, noise: Tensor | None) -> Tensor:
        """The nearest level, 0 for the least; a value about halfway may become the other one."""
        half = len(LEVELS[self.bits])
        ratios = values / nonzero(self.units(scales))
        factor, bend = _BENDS[self.bits]
        if not bend:
            return signed_codes(ratios.mul_(factor).floor_().clamp_(-half, half - 1), half)
        ratios.clamp_(-_TURN, _TURN)
        # addcmul would round fewer times, and not equally often on a CPU and a GPU
        bent = (ratios * (bend / factor)).mul_(ratios).add_(1 / factor)
        return signed_codes(ratios.div_(bent).floor_(), half)

    def points(self) -> Tensor:
        """The levels, ascending: float32 [2**bits]."""
        positive = torch.tensor(LEVELS[self.bits], dtype=torch.float32)
        return torch.cat([-positive.flip(0), positive])

    def bound(self, values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """The widest part of a level, or all beyond the last one."""
        units, magnitude, last = self.units(scales), values.abs(), LEVELS[self.bits][-1]
        error = torch.maximum(units * self._widest, magnitude - units * last)
        largest = units * last
        return (error + (error + largest) * 2.0**-18).clamp(min=_SMALLEST_SCALE), largest

    @cached_property
    def _widest(self) -> float:
        """The largest distance between a level and the end of its part, in scales."""
        factor, bend = _BENDS[self.bits]
        levels = LEVELS[self.bits]
        # the lesser solution of a * t / (1 + c * t**2) = k
        ends: list[float] = [2 * k / (factor + (factor**2 - 4 * bend * k**2) ** 0.5) for k in range(len(levels))]
        below = [level - end for level, end in zip(levels, ends, strict=True)]
        above = [end - level for level, end in zip(levels, ends[1:], strict=False)]
        return max(below + above)
