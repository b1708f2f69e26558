"""What all stages of a pipeline report of a step, in the process of the last one: bytes, and what they exchanged.

The others send it a note when their step is over, and go on. The last stage waits for these notes, which costs nothing:
the first frame of its next step comes later, after the first stage has ended this one. Room for that frame is made
before, because gloo moves bytes only once there is room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any

import torch.distributed as dist

from thinwire.errors.words import numbered, were
from thinwire.pipeline.measuring.meters import Meter, Traffic
from thinwire.pipeline.measuring.spans import Work
from thinwire.pipeline.processes.collectives import AsyncNotes, Kind
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
    """What the stages of a pipeline send and exchange, step by step.

    Args:
        meters: those of the stages of this process, by stage.
        where: where all stages live.
        timeout: of a wait.
    """

    def __init__(self, meters: Mapping[int, Meter], where: Placement, timeout: timedelta) -> None:
        self._meters, self._where = meters, where
        self._notes: AsyncNotes | None = None
        if where.num_processes > 1:
            self._notes = AsyncNotes(where.pipeline, Kind.STEP, self._in_words, timeout, where.last_process)
        self._before = dict.fromkeys(meters, (0, 0, 0, 0.0))

    def begin(self) -> None:
        """Say that a step begins."""
        self._before = self._spent()
        if self._notes is not None:
            self._notes.expect()

    def end(self) -> tuple[int, int, list[StageExchanged]]:
        """Say that a step is over: bytes of the frames sent in it, of the tensors in them, and what was exchanged.

        Of all stages in the process of the last one, elsewhere of the stages there; no exchange if no stage had one.
        PeerError if a process is gone or silent.
        """
        mine = [
            [stage, *(now - before for now, before in zip(spent, self._before[stage], strict=True))]
            for stage, spent in self._spent().items()
        ]
        told: list[list[Any]] = [mine]
        if self._notes is not None:
            self._notes.send(mine)
            what = "waiting for the reports of all stages on a step"
            with next(iter(self._meters.values())).section("neighbour", what, Work("report")):
                told += self._notes.receive()
        _, sent, uncompressed, exchanged, seconds = zip(*(rows := sorted(chain(*told))), strict=True)
        stages = [StageExchanged(stage, nbytes, spent) for stage, _, _, nbytes, spent in rows]
        return sum(sent), sum(uncompressed), stages if any((*exchanged, *seconds)) else []

    def _spent(self) -> dict[int, tuple[int, int, int, float]]:
        """By stage here, bytes sent so far and of the tensors in them; bytes and seconds of the exchange."""
        sent = {stage: sum(meter.sent.values(), Traffic()) for stage, meter in self._meters.items()}
        return {
            stage: (sent[stage].bytes, sent[stage].uncompressed, meter.exchanged, sum(meter.exchange.values()))
            for stage, meter in self._meters.items()
        }

    def _in_words(self, process: int) -> str:
        mine, theirs = self._where.stages_of(dist.get_rank()), self._where.stages_of(process)
        if process == dist.get_rank():
            return f"{were(mine)} reporting a step to the last stage"
        return f"{were(mine)} waiting for the report on a step of {numbered('stage', theirs)}"
