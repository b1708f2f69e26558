"""q's grid with zero, for tensors with many zeros or small values.

midtread     (2**(b-1) - code) * s / 2**(b-1)              2**b points from s to just short of -s, zero among them

s has the sign of the block's element of largest magnitude, so the longer side is where it is needed.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compress.codecs.fused.arithmetic import CodeRule, Coding, nonzero
from thinwire.compress.codecs.grid import Grid, bfloat16_above, float32_slack

_OVER_BLOCK = (0, 2)
_SMALLEST_SCALE = 2.0**-118


@dataclass(frozen=True)
class MidTreadGrid(Grid):
    """Zero, 2**(b-1) points on the side of the block's largest magnitude, and one less on the other.

    The scale is that magnitude as bf16, rounded up, with its sign. Decoded, code k is
    (2**(b-1) - k) * s/2**(b-1), which float32 holds exactly. On the other side values beyond the last point, which may
    be a whole step short of -s, become that point.
    """

    measuring: ClassVar[CodeRule | None] = CodeRule.NEAREST

    @property
    def half(self) -> int:
        """The code of zero."""
        return (self.last + 1) // 2

    def measure(self, values: Tensor) -> Tensor:
        """The signed scale of each block, as bf16: [count, 1]."""
        least, most = values.amin(_OVER_BLOCK).unsqueeze(1), values.amax(_OVER_BLOCK).unsqueeze(1)
        magnitudes = bfloat16_above(torch.maximum(most, -least), _SMALLEST_SCALE)
        # by a comparison: processors and vector instructions differ in the sign of a sum that is zero or NaN
        return torch.where(most + least < 0, -magnitudes, magnitudes)

    def coding(self, scales: Tensor) -> Coding:
        """The nearest point, counted from the scale down."""
        return Coding(CodeRule.NEAREST, -nonzero(self._steps(scales)))

    def evaluate(self, codes: Tensor) -> None:
        """Steps from the point of zero."""
        codes.neg_().add_(self.half)

    def factors(self, scales: Tensor) -> tuple[Tensor, Tensor | None]:
        """The steps, s / 2**(bits-1)."""
        return self._steps(scales), None

    def bound(self, values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Half a step of the grid, more for what is cut off, and the scale."""
        scales = scales.float()
        largest, step = scales.abs(), scales.abs() / self.half
        oriented = torch.where(scales < 0, -values, values)
        cut = torch.maximum(oriented - largest, step - largest - oriented)
        return self._error(cut, step, largest), largest

    def _error(self, cut: Tensor, step: Tensor, largest: Tensor) -> Tensor:
        """The largest error of values that are `cut` beyond the outermost point."""
        return (torch.maximum(cut, step / 2) + float32_slack(largest)).clamp(min=_SMALLEST_SCALE)

    def _steps(self, scales: Tensor) -> Tensor:
        return scales.float() * 2.0 ** (1 - self.bits)
