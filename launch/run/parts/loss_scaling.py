"""The factor of the loss in fp16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinwire.launch.run.parts.part import RunPart
from thinwire.pipeline.training.optimization import LossScale


class LossScaling(RunPart):
    """The state of the trainer's loss scale, which steps raise and lower."""

    name = "loss_scale"

    def __init__(self, scale: LossScale) -> None:
        self._scale = scale

    def state_dict(self) -> dict[str, Any]:
        """The scale's own state."""
        return self._scale.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the scale's own state."""
        self._scale.load_state_dict(state)

    def told(self) -> dict[str, Any]:
        """The scale in the summary."""
        return {"loss_scale": self._scale.told()}
