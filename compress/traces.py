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
class Trace:
    """The rows and indices of the values of one micro-batch of an activation."""

    rows: Rows
    """Which rows were sent in full."""
    indices: Tensor | None
    """The indices of the other rows' values, int64 [rows, k]; None if all rows went in full."""


class Traces:
    """Traces of one activation at one end, kept from its message until the gradient is coded."""

    def __init__(self) -> None:
        self._by_position: dict[int, Trace] = {}

    def record(self, microbatch: Microbatch, trace: Trace) -> None:
        """Keep a micro-batch's trace until `forget`."""
        self._by_position[microbatch.positions.start] = trace

    def of(self, microbatch: Microbatch) -> Trace:
        """The trace of a micro-batch."""
        return self._by_position[microbatch.positions.start]

    def forget(self, microbatch: Microbatch) -> None:
        """Drop a micro-batch's trace, if there is one."""
        self._by_position.pop(microbatch.positions.start, None)
