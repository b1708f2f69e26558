"""One number of every stage, gathered in all processes of a pipeline once in a step.

A collective call makes room for what arrives only when it is called: over a slow link, all wait for two latencies after
the last process has come. Here room is made when the step begins. So the process that comes last waits for nobody, and
the others for one latency.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thinwire.pipeline.process import Placement, in_words, were
from thinwire.pipeline.transport import ProcessGroupReceiver, ProcessGroupSender

_TAG = 2  # other messages of the group have 0 and 1
_NUMBER = 8  # bytes


class StageNumbers:
    """One float64 of every stage of a pipeline, once in a step.

    Args:
        where: the processes of the stages.
        what: the number in words, with an article; a PeerError names it.
        timeout: of a wait.
    """

    def __init__(self, where: Placement, what: str, timeout: timedelta) -> None:
        self._where, self._what = where, what
        group = where.pipeline or dist.group.WORLD
        assert group is not None, "torch.distributed is initialized"
        ranks, mine = dist.get_process_group_ranks(group), dist.get_rank()
        of_all: dict[str, Any] = {"group": group, "tag": _TAG, "timeout": timeout}
        others = {rank: place for place, rank in enumerate(ranks) if rank != mine}
        size = _NUMBER * where.num_stages
        self._mine = torch.zeros(where.num_stages, dtype=torch.float64)
        self._senders = {rank: ProcessGroupSender(size, peer=place, **of_all) for rank, place in others.items()}
        self._receivers = {rank: ProcessGroupReceiver(size, peer=place, **of_all) for rank, place in others.items()}

    def expect(self) -> None:
        """Make room for the numbers of the step that begins."""
        for rank, receiver in self._receivers.items():
            receiver.post(1, self._waiting_for(rank))

    def tell(self, local: Mapping[int, float]) -> None:
        """Send the numbers of the stages here, and wait for nobody."""
        self._mine = torch.zeros(self._where.num_stages, dtype=torch.float64)
        for stage, value in local.items():
            self._mine[stage] = value
        for rank, sender in self._senders.items():
            sender.flush()
            buffer = sender.take()
            buffer.copy_(self._mine.view(torch.uint8))
            sender.send(buffer, len(buffer), self._telling(rank))

    def hear(self) -> list[float]:
        """The numbers of all stages, in stage order. PeerError if a process is gone or silent."""
        found = self._mine.clone()
        for rank, receiver in self._receivers.items():
            buffer = receiver.receive(self._waiting_for(rank))
            theirs = self._where.stages_of(rank)
            found[theirs] = buffer.view(torch.float64)[theirs]
            receiver.give(buffer)
        return [float(number) for number in found]

    def _telling(self, rank: int) -> str:
        mine, theirs = self._where.stages_of(dist.get_rank()), self._where.stages_of(rank)
        return f"{were(mine)} telling {in_words(theirs)} {self._what}"

    def _waiting_for(self, rank: int) -> str:
        mine, theirs = self._where.stages_of(dist.get_rank()), self._where.stages_of(rank)
        return f"{were(mine)} waiting for {self._what} of {in_words(theirs)}"
