"""What all stages of a pipeline sent in a step, in the process that reports.

The others send it a note when their step is over, and go on. The last stage waits for these notes, which costs nothing:
the first frame of its next step comes later, after the first stage has ended this one. Beside other replicas it would
make room for what they send too late, so there each process counts its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from thinwire.errors.words import numbered, were
from thinwire.pipeline.measuring.meters import Meter, Traffic
from thinwire.pipeline.processes.collectives import AsyncNotes, Kind
from thinwire.pipeline.processes.placement import Placement


class StepTraffic:
    """The bytes that the stages of a pipeline send, step by step.

    Args:
        meters: of the stages of this process.
        where: where all stages live.
        timeout: of a wait.
        num_replicas: replicas of the whole run. With several, nothing is sent.
    """

    def __init__(self, meters: Sequence[Meter], where: Placement, timeout: timedelta, num_replicas: int) -> None:
        self._meters, self._where = meters, where
        self._notes: AsyncNotes | None = None
        if where.num_processes > 1 and num_replicas == 1:
            self._notes = AsyncNotes(where.pipeline, Kind.SENT, self._in_words, timeout, where.last_process)
        self._before = (0, 0)

    def begin(self) -> None:
        """Say that a step begins."""
        self._before = self._sent()
        if self._notes is not None:
            self._notes.expect()

    def end(self) -> tuple[int, int]:
        """Say that a step is over: bytes of the frames sent in it, and of the tensors in them, uncompressed.

        Those of all stages in the process of the last one; elsewhere, and beside other replicas, those of the stages
        there. PeerError if a process is gone or silent.
        """
        mine = [now - before for now, before in zip(self._sent(), self._before, strict=True)]
        told = [mine]
        if self._notes is not None:
            self._notes.send(mine)
            with self._meters[0].section("neighbour", "waiting for the bytes that all stages sent"):
                told += self._notes.receive()
        nbytes, uncompressed = (sum(each) for each in zip(*told, strict=True))
        return nbytes, uncompressed

    def _sent(self) -> tuple[int, int]:
        sent = sum((traffic for meter in self._meters for traffic in meter.sent.values()), Traffic())
        return sent.bytes, sent.uncompressed

    def _in_words(self, process: int) -> str:
        mine, theirs = self._where.stages_of(dist.get_rank()), self._where.stages_of(process)
        if process == dist.get_rank():
            return f"{were(mine)} reporting the bytes of a step to the last stage"
        return f"{were(mine)} waiting for the bytes of a step of {numbered('stage', theirs)}"
