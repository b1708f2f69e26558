"""Whether tensors on a GPU are finite: flags on the GPU, read once the pass is over, because a look would wait."""

from __future__ import annotations

import torch
from torch import Tensor


class FiniteFlags:
    """A flag for each tensor of a pass, with words that say which it is."""

    def __init__(self) -> None:
        self._flags: list[Tensor] = []
        self._names: list[str] = []

    def add(self, tensor: Tensor, what: str) -> None:
        """Order a flag of a tensor; nobody waits."""
        if tensor.is_floating_point():
            self._flags.append(tensor.isfinite().all())
            self._names.append(what)

    def first_bad(self) -> str | None:
        """The first tensor with NaN or infinity since the last call, in words; waits for the GPU."""
        if not self._flags:
            return None
        finite, names = torch.stack(self._flags).tolist(), self._names
        self._flags, self._names = [], []
        return next((name for name, fine in zip(names, finite, strict=True) if not fine), None)
