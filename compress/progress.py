"""How far training is: what a codec that changes while training goes on depends on. All stages know it alike."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """A point in training."""

    step: int
    """Optimizer steps that are done."""
    steps_per_epoch: int
    """Optimizer steps in one pass through the training data."""
