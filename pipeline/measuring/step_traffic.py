"""What all stages of a pipeline report of a step, in the process of the last one: bytes, exchanges, gradient norms.

The others send it a note when their step is over, and go on. The last stage waits for these notes, which costs nothing:
the first frame of its next step comes later, after the first stage has ended this one. Room for that frame is made
before, because gloo moves bytes only once there is room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from thinwire.pipeline.measuring.meters import Meter, Traffic
from thinwire.pipeline.processes.collectives import AsyncNotes, NoteKind, in_words
from thinwire.pipeline.processes.placement import Placement


@dataclass(frozen=True)
class StageExchanged:
    """What one stage exchanged with other replicas in a step."""

    stage: int
    bytes: int
    """Bytes of the frames that it sent to other replicas and got from them."""
    seconds: float
    """Seconds of the step that the exchange took."""


class StepTraffic:
    """The bytes that the stages of a pipeline send and exchange, step by step; `meters` are of the stages here."""

    def __init__(self, meters: Mapping[int, Meter], where: Placement, timeout: timedelta) -> None:
        self._meters = meters
        told = in_words(where, "reporting a step to the last stage", "the report on a step")
        self._notes = AsyncNotes(where.pipeline, NoteKind.STEP, told, timeout, where.last_process)
        self._before = self._spent()

    def begin(self) -> None:
        """Say that a step begins."""
        self._before = self._spent()
        self._notes.expect()

    def end(self, squares: Mapping[int, float]) -> tuple[int, int, list[StageExchanged], dict[int, float]]:
        """Say that a step is over: bytes of the frames sent in it, and of the tensors in them, uncompressed.

        Then what each stage exchanged, empty if none did; and the squares of the gradient norms by stage. In the
        process of the last stage all these are of all stages, elsewhere of the stages there. PeerError if a process is
        gone or silent.
        """
        spent = [
            [stage, *(now - before for now, before in zip(after, self._before[stage], strict=True))]
            for stage, after in self._spent().items()
        ]
        self._notes.send([spent, [*squares.items()]])
        with next(iter(self._meters.values())).section("neighbour", "waiting for the reports of all stages on a step"):
            told = [(spent, squares.items()), *self._notes.receive()]
        rows = sorted(row for rows, _ in told for row in rows)
        exchanged = [StageExchanged(stage, nbytes, seconds) for stage, _, _, nbytes, seconds in rows]
        return (
            sum(row[1] for row in rows),
            sum(row[2] for row in rows),
            exchanged if any(each.bytes or each.seconds for each in exchanged) else [],
            {stage: square for _, pairs in told for stage, square in pairs},
        )

    def _spent(self) -> dict[int, tuple[int, int, int, float]]:
        """Of each stage here, so far: bytes sent, their tensors' bytes, and bytes and seconds of exchanges."""
        sent = {stage: sum(meter.sent.values(), Traffic()) for stage, meter in self._meters.items()}
        return {
            stage: (sent[stage].bytes, sent[stage].uncompressed, meter.exchanged, sum(meter.exchange.values()))
            for stage, meter in self._meters.items()
        }
