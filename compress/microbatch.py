"""How far training is, the kinds of pass, and one micro-batch of a pass.

Both ends of every boundary know these without a message, because every stage walks the same samples in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

PassKind = Literal["train", "warmup", "eval-on", "eval-off"]
"""The kind of a pass through the schedule:

- `train` uses the method.
- `warmup` trains too, but sends everything in full and fills the buffers.
- `eval-on` evaluates with the method, and does not change training's buffers.
- `eval-off` evaluates with everything in full, and changes nothing.
"""


@dataclass(frozen=True, eq=False)
class Microbatch:
    """One micro-batch of one pass, as all stages know it."""

    kind: PassKind
    """The kind of pass it belongs to."""
    positions: range
    """Each row's position in the batch: (accumulation pass * micro-batches + micro-batch) * R + row."""
    sample_ids: Tensor | None = None
    """Each row's sample id, int64 [R]; None if not given."""
    step: int = 0
    """Index of the pass, counted from 0 in each phase."""
    index: int = 0
    """Index of the micro-batch in the pass."""
    length: int | None = None
    """How many elements of each row's first dimension cross; zeros arrive for the others. None means all."""


@dataclass(frozen=True)
class Progress:
    """A point in training, on which codecs depend that change while it goes on."""

    step: int
    """Optimizer steps that are done."""
    steps_per_epoch: int
    """Optimizer steps in one pass through the training data."""
