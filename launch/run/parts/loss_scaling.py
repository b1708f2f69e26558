"""The factor of the loss in fp16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinwire.launch.run.parts.part import RunPart


class LossScaling(RunPart):
    """The state of the trainer's loss scale, which steps raise and lower."""

    name = "loss_scale"

    def state_dict(self) -> dict[str, Any]:
        """The scale's own state."""
        return self._trainer.update.scale.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the scale's own state."""
        self._trainer.update.scale.load_state_dict(state)

    def told(self) -> dict[str, Any]:
        """The scale in the summary."""
        return {"loss_scale": self._trainer.update.scale.told()}
