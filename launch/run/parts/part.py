"""What all parts of a run have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinwire.launch.run.assembly import Assembly
from thinwire.pipeline.training.trainer import StepRecord


class RunPart:
    """A part of a run. Every process has each of them, and `Run` calls all in one order, so they may talk together."""

    name = ""
    """That of its state in checkpoints; a part without a name has none."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly, self._prepared, self._recipe = assembly, assembly.prepared, assembly.prepared.recipe
        self._trainer, self._where = assembly.trainer, assembly.trainer.placement

    def begin(self) -> None:
        """Before the first step of this process, once the state of a checkpoint is loaded."""

    def after_step(self, done: int, record: StepRecord | None) -> None:
        """After so many steps. Without a record, a run goes on inside of what comes after this step.

        Raises:
            EvaluationStoppedError: in all processes, one was asked to stop meanwhile.
        """

    def end(self, done: int) -> None:
        """After the last step. Raises as `after_step`."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of this part, as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from this state. KeyError, TypeError or ValueError if it is not what a run writes."""

    def told(self) -> dict[str, Any]:
        """The fields of summary.json that are this part's. Every process is asked; the one that reports writes them."""
        return {}
