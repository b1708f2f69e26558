"""The errors of a pipeline; `thinwire.errors` draws the whole family."""

from __future__ import annotations

from thinwire.errors import ThinwireError


class PipelineError(ThinwireError, RuntimeError):
    """Base of all errors that stop a pipeline with a sentence for its user."""


class OptionsError(PipelineError, ValueError):
    """Options that cannot work; the message holds every mistake found, a line each."""


class MismatchError(PipelineError):
    """The two ends of a boundary have different settings."""


class WireError(PipelineError):
    """A frame is not the planned one. Training on it would be worse than stopping."""


class PeerError(PipelineError):
    """A wait for another stage failed. The message says for what, from whom, and why it ended."""


class NonFiniteError(PipelineError):
    """A tensor to be sent holds NaN or infinity."""


class EvaluationStoppedError(PipelineError):
    """An evaluation ended early, because a process was asked to stop."""


class MemoryFullError(PipelineError):
    """A stage needs more memory than its device has."""


class CheckpointError(PipelineError):
    """A checkpoint cannot be written, is damaged, or does not fit the run."""
