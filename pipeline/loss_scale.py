"""The loss scale of fp16: one factor and one decision for all stages.

In float16 small gradients become zero. So the loss is multiplied by a factor, and the gradients of weights are divided
by it before anything reads them. If the gradient of any stage is not finite, the factor was too large: no stage steps,
and the factor halves. After many good steps it doubles. All stages see the same norm, so all decide alike.

The factor is a power of two: it changes the exponents of numbers, never their digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from thinwire.pipeline.errors import NonFiniteError

START = 2.0**16
"""The first factor, as in torch's GradScaler."""
GROWS_AFTER = 2000
"""Good steps in a row before the factor doubles, as there."""
LEAST = 1.0
"""The least factor: if gradients are not finite even so, the training itself diverges."""


class LossScale:
    """The factor of the loss.

    Args:
        active: whether there is one; else the factor is 1 and nothing is skipped.

    Attributes:
        factor: what the loss is multiplied by.
        skipped: steps that were skipped so far.
    """

    def __init__(self, *, active: bool) -> None:
        self.active = active
        self.factor = START if active else 1.0
        self.skipped = 0
        self._good = 0

    def undo(self, losses: Sequence[Tensor]) -> list[Tensor]:
        """The losses without the factor."""
        return [loss / self.factor for loss in losses] if self.active else list(losses)

    def undo_gradients(self, parameters: Iterable[Parameter]) -> None:
        """Divide the gradients of parameters by the factor, in place."""
        if not self.active:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, 1 / self.factor)

    def allows(self, norm: float) -> bool:
        """Whether the stages may step with gradients of this norm; the factor follows. Call it once a step.

        Raises:
            NonFiniteError: the gradients are not finite even with the least factor.
        """
        if math.isfinite(norm):
            self._good += 1
            if self._good == GROWS_AFTER:
                self.factor, self._good = 2 * self.factor, 0
            return True
        if self.factor <= LEAST:
            raise NonFiniteError(
                "the gradients hold NaN or infinity even with a loss scale of 1; lower optimizer.lr, or set "
                "training.precision to bf16"
            )
        self.factor, self._good, self.skipped = self.factor / 2, 0, self.skipped + 1
        return False

    def told(self) -> dict[str, Any] | None:
        """The factor and the number of skipped steps; None without a factor."""
        return {"factor": self.factor, "skipped": self.skipped} if self.active else None

    def state_dict(self) -> dict[str, Any]:
        """The state, as JSON values."""
        return {"factor": self.factor, "good": self._good, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state that `state_dict` returned."""
        self.factor, self._good, self.skipped = float(state["factor"]), int(state["good"]), int(state["skipped"])
