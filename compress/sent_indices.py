"""The indices of an activation's values, for a gradient sent at the same indices (`reuse`).

Each end of a boundary's activations records what it sent or received. The coder of the gradient at the same end reads
the record, then drops it. No index crosses the wire a second time.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from thinwire.compress.microbatch import Microbatch
from thinwire.compress.plan import Rows


@dataclass(frozen=True, eq=False)
class SentIndices:
    """The rows and indices of the values of one micro-batch of an activation."""

    rows: Rows
    """Which rows were sent in full."""
    indices: Tensor | None
    """The indices of the other rows' values, int64 [rows, k]; None if all rows went in full."""


class IndexMemory:
    """The indices of one activation at one end, kept from its message until the gradient is coded."""

    def __init__(self) -> None:
        self._by_position: dict[int, SentIndices] = {}

    def record(self, microbatch: Microbatch, sent: SentIndices) -> None:
        """Keep a micro-batch's indices until `forget`."""
        self._by_position[microbatch.positions.start] = sent

    def of(self, microbatch: Microbatch) -> SentIndices:
        """The indices of a micro-batch."""
        return self._by_position[microbatch.positions.start]

    def forget(self, microbatch: Microbatch) -> None:
        """Drop a micro-batch's indices, if they are there."""
        self._by_position.pop(microbatch.positions.start, None)
