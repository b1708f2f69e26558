"""What an exchange of gradients is, whatever travels: first every replica submits, then all go through its rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor
from torch.nn import Parameter

from thinwire.compress import Progress
from thinwire.pipeline.meters import Meter


class Exchange(Protocol):
    """Adds up gradients of one stage over its replicas; `meter` is that of the stage."""

    meter: Meter
    parameters: Sequence[Parameter]
    """Those whose gradients it adds up."""
    next_bucket: int
    """The number behind its last bucket."""

    def submit(self, replica: int, progress: Progress) -> None:
        """Send the gradients of one replica, and clear them."""

    @property
    def rounds(self) -> Sequence[Callable[[Progress], None]]:
        """What follows once all replicas here have submitted: each waits for what the others sent in the one before.

        After the last, every parameter has the sum over all replicas. All exchanges of a process have equally many.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all that it remembers, by the names of parameters."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take exactly what `state_dict` returned. CheckpointError if something is missing."""


class StageSum(Exchange, Protocol):
    """An exchange of two rounds."""

    def add_up(self, progress: Progress) -> None:
        """The first round: add up what the replicas here own, and send the sums to all."""

    def finish(self, progress: Progress) -> None:
        """The second: give every parameter the sum over all replicas; collective."""
