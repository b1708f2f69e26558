"""What a codec starts from: a part of the last message in the same place (the Q of `lowrank`).

It is read from the payload alone, so both ends hold the same. It goes from one training pass to the next, by position
in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from thinwire.compress.microbatch import Microbatch


class WarmStarts:
    """The starts of one tensor at one end, by the position of a micro-batch's first row."""

    def __init__(self) -> None:
        self._by_position: dict[int, Tensor] = {}

    def of(self, microbatch: Microbatch) -> Tensor | None:
        """What the next message in this place starts from; None before the first."""
        return self._by_position.get(microbatch.positions.start)

    def keep(self, microbatch: Microbatch, start: Tensor | None) -> None:
        """Keep what the next message in this place starts from; None changes nothing."""
        if start is not None:
            self._by_position[microbatch.positions.start] = start

    def state_dict(self) -> dict[int, Tensor]:
        """Every start, for a checkpoint."""
        return dict(self._by_position)

    def load_state_dict(self, state: Mapping[int, Tensor]) -> None:
        """Set the starts to what `state_dict` returned."""
        self._by_position = dict(state)
