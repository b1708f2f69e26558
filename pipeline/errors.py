"""What can go wrong between stages, as one small family.

PipelineError
├── OptionsError      options that cannot work, all mistakes at once
├── MismatchError     the two ends of a boundary were started differently
├── WireError         a frame that is not the planned one
├── PeerError         a stage that is gone, or silent beyond the time-out
├── CheckpointError   a checkpoint that cannot be written, read or resumed
└── NonFiniteError    NaN or infinity in a tensor about to be sent
"""

from __future__ import annotations

from collections.abc import Sequence


class PipelineError(RuntimeError):
    """Base of everything that stops a pipeline with a sentence for its user."""


class OptionsError(PipelineError, ValueError):
    """Options that cannot work; the message holds every mistake found, a line each."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = tuple(mistakes)


class MismatchError(PipelineError):
    """The two ends of a boundary disagree on what will cross it."""


class WireError(PipelineError):
    """A frame arrived that is not the one planned: training on it would be worse than stopping."""


class PeerError(PipelineError):
    """A wait on another stage failed; the message says what was awaited, from whom, and why it ended."""


class NonFiniteError(PipelineError):
    """A tensor to be sent holds NaN or infinity."""


class CheckpointError(PipelineError):
    """A checkpoint cannot be written, is damaged, or does not fit the run."""
