"""How a grid turns one value into a code, as data: eager code and kernels do what it says.

    NEAREST    round(x / divisor - shift)
    FLOOR      floor(x / divisor)
    RANGE      round((x - shift) / divisor * last)

All but RANGE are cut to -2**(bits-1) .. 2**(bits-1) - 1 and counted from the first of these. Every operation is
rounded to float32 by itself.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class CodeRule(IntEnum):
    """How a value becomes a code."""

    FLOOR = 0
    NEAREST = 1
    RANGE = 2


@dataclass(frozen=True)
class Coding:
    """How the values of each block become codes."""

    rule: CodeRule
    divisors: Tensor
    """float32 [count, 1]; infinity, or 1 for a range, in place of 0."""
    shifts: Tensor | None = None
    """float32 [count, 1]; None for zeros."""


def nonzero(divisors: Tensor, instead: float = torch.inf) -> Tensor:
    """`divisors`, with something else for 0."""
    return divisors.masked_fill(divisors == 0, instead)
