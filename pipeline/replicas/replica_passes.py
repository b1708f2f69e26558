"""Which passes of a step each replica runs: all passes have as many samples, and replicas take them in their order.

passes    | 0  1  2  3 | 4  5 | 6  7  8  9 |     of replicas that run 4, 2 and 4 in each step
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ReplicaPasses:
    """The passes of a step."""

    passes: tuple[int, ...]
    """Those of each replica."""

    @property
    def total(self) -> int:
        """All passes of a step."""
        return sum(self.passes)

    def before(self, replica: int) -> int:
        """The passes of the replicas before one."""
        return sum(self.passes[:replica])

    def behind(self, replica: int) -> int:
        """The passes of a replica and of those behind it."""
        return sum(self.passes[replica:])

    def rows_of(self, replica: int, whole: Tensor) -> Tensor:
        """The rows of one replica of a tensor with a row for each sample of the step."""
        size, first = len(whole) // self.total, self.before(replica)
        return whole[first * size : (first + self.passes[replica]) * size]

    def weight(self, replica: int) -> float:
        """What a replica counts in a mean over all samples; 1 on average, and exactly 1 if all have as many."""
        return self.passes[replica] * len(self.passes) / self.total
