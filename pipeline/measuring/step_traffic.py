"""What all stages of a pipeline report of a step, in the process of the last one: bytes, exchanges, gradient norms.

The others send it a note when their step is over, and go on. The last stage waits for these notes, which costs nothing:
the first frame of its next step comes later, after the first stage has ended this one. Room for that frame is made
before, because gloo moves bytes only once there is room.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from thinwire.pipeline.measuring.meters import Meter, Traffic
from thinwire.pipeline.processes.collectives import AsyncNotes, NoteKind, in_words
from thinwire.pipeline.processes.placement import Placement


class StepTraffic:
    """The bytes that the stages of a pipeline send, step by step."""

    def __init__(self, meters: Sequence[Meter], where: Placement, timeout: timedelta) -> None:
        self._meters = meters
        told = in_words(where, "reporting a step to the last stage", "the report on a step")
        self._notes = AsyncNotes(where.pipeline, NoteKind.STEP, told, timeout, where.last_process)
        self._before = (0, 0)

    def begin(self) -> None:
        """Say that a step begins."""
        self._before = self._sent()
        self._notes.expect()

    def end(self, beside: Any = None) -> tuple[int, int, list[Any]]:
        """Say that a step is over: bytes of the frames sent in it, and of the tensors in them, uncompressed.

        Those of all stages in the process of the last one, elsewhere those of the stages there. The third is what the
        same processes gave as `beside`, JSON values. PeerError if a process is gone or silent.
        """
        mine = [*(now - before for now, before in zip(self._sent(), self._before, strict=True)), beside]
        self._notes.send(mine)
        with self._meters[0].section("neighbour", "waiting for the reports of all stages on a step"):
            told = [mine, *self._notes.receive()]
        nbytes, uncompressed, others = zip(*told, strict=True)
        return sum(nbytes), sum(uncompressed), list(others)

    def _sent(self) -> tuple[int, int]:
        sent = sum((traffic for meter in self._meters for traffic in meter.sent.values()), Traffic())
        return sent.bytes, sent.uncompressed
