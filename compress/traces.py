"""Where an activation's values went, for a gradient that comes back at the same indices (`reuse`).

The two ends of a boundary's activations each record what they sent or received; the coder of the gradient at the same
end reads it, and lets go of it. No index crosses the wire a second time.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from thinwire.compress.microbatch import Microbatch
from thinwire.compress.plan import Rows


@dataclass(frozen=True, eq=False)
class Trace:
    """Where the values of one micro-batch of an activation went."""

    rows: Rows
    """Which rows went in full."""
    indices: Tensor | None
    """The indices of the other rows' values, int64 [rows, k]; None if there were none."""


class Traces:
    """Traces of one activation at one end, from its message until the gradient has been coded."""

    def __init__(self) -> None:
        self._by_position: dict[int, Trace] = {}

    def record(self, microbatch: Microbatch, trace: Trace) -> None:
        """Keep where a micro-batch's values went, until `forget`."""
        self._by_position[microbatch.positions.start] = trace

    def of(self, microbatch: Microbatch) -> Trace:
        """Where a micro-batch's values went."""
        return self._by_position[microbatch.positions.start]

    def forget(self, microbatch: Microbatch) -> None:
        """Let go of a micro-batch, if it was recorded."""
        self._by_position.pop(microbatch.positions.start, None)
