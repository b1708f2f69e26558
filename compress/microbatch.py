"""The words for what crosses a boundary when: the kinds of pass, and one micro-batch of a pass.

Both ends of every boundary know these without a message, because every stage walks the same samples in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

PassKind = Literal["train", "warmup", "eval-on", "eval-off"]
"""A pass through the schedule: `train` through the method; `warmup` trains too, with everything sent in full, filling
buffers; `eval-on` evaluates through the method, training's buffers untouched; `eval-off` evaluates with everything sent
in full, nothing touched."""


@dataclass(frozen=True, eq=False)
class Microbatch:
    """One micro-batch of one pass, as all stages know it."""

    kind: PassKind
    """The kind of pass it belongs to."""
    positions: range
    """Each row's position in the batch: (accumulation pass * micro-batches + micro-batch) * R + row."""
    sample_ids: Tensor | None = None
    """Each row's sample id, int64 [R]; None where nobody said."""
    step: int = 0
    """Index of the pass, counted from 0 in each phase."""
    index: int = 0
    """Index of the micro-batch in the pass."""
