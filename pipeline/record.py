"""The record of one optimizer step, for the log."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.pipeline.measuring.meters import Section
from thinwire.pipeline.replicas.step_exchanges import StepExchanged


@dataclass(frozen=True)
class StepRecord:
    """The record of one optimizer step. `loss` is None except in the process that reports."""

    step: int
    epoch: int
    loss: float | None
    """If replicas step alone, that of the first one, as is the norm."""
    lr: float
    grad_norm: float | None
    seconds: float
    samples: int
    """Samples of all replicas."""
    sections: dict[Section, float]
    bytes: int
    """Bytes of the frames that this process's stages sent and received."""
    uncompressed: int
    """Bytes of the tensors in those frames, uncompressed."""
    skipped: bool = False
    """Whether no stage stepped, because a gradient of fp16 was not finite."""
    exchanged: list[StepExchanged] = field(default_factory=list)
    """What the stages of the first replica exchanged with the others in earlier steps, as far as it was not known."""
