"""The losses of a step that other replicas computed, in the process that reports."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import chain

import torch.distributed as dist
from torch import Tensor

from thinwire.pipeline.processes.collectives import Kind, Words
from thinwire.pipeline.processes.placement import Placement


class LossesOfOthers:
    """Losses of replicas that add up their gradients in each step; between others, and in a simulation, none travel.

    They travel while gradients do, so that nobody waits for them.

    Args:
        where: where all stages live.
        travels: whether this process has the last stage of such a replica.
        timeout: of a wait.
    """

    def __init__(self, where: Placement, timeout: timedelta, *, travels: bool) -> None:
        self._where = where
        self._words = Words(where.across, Kind.LOSSES, self._in_words, timeout, where.reporter) if travels else None

    def expect(self) -> None:
        """Make room for those of the step that begins."""
        if self._words is not None:
            self._words.expect()

    def tell(self, losses: Sequence[Tensor]) -> None:
        """Send those of this replica, and wait for nobody."""
        if self._words is not None:
            self._words.say([float(loss) for loss in losses])

    def hear(self) -> list[float]:
        """Those of all other replicas, in their order, in the process that reports; else none.

        PeerError if a process is gone or silent.
        """
        return [] if self._words is None else [*chain(*self._words.hear())]

    def _in_words(self, process: int) -> str:
        if process == dist.get_rank():
            return f"replica {self._where.replica} was telling replica 0 its losses"
        return f"replica {self._where.replica} was waiting for the losses of replica {self._where.replica_of(process)}"
