"""What each stage of a pipeline spent on the exchange between replicas in one step, in the process that reports.

The other processes send theirs when their step is over, and do not wait. The process that reports holds the last stage,
and its next work is a forward of stage 0, which comes later than these words.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from thinwire.pipeline.exchange import Words
from thinwire.pipeline.process import Placement
from thinwire.pipeline.replicas.drain import exchange_report, hidden_shares
from thinwire.pipeline.stage import CompressedStage
from thinwire.pipeline.tracing.spans import Work

_WHAT = "waiting to hear of the exchange of all stages"


@dataclass(frozen=True)
class StageExchanged:
    """What one stage exchanged in a step."""

    stage: int
    bytes: int
    """Bytes of the frames that it sent to other replicas and got from them."""
    seconds: float
    """Seconds of the step that the exchange took."""
    hidden: float | None
    """The share hidden of the exchanges that ended in this step; None if none did, or if it is not known."""


class StepExchange:
    """The exchanges of the stages of a pipeline, step by step.

    Args:
        stages: the stages of this process.
        where: where all stages live.
        num_replicas: replicas of the whole run. With one, nothing is told.
    """

    def __init__(self, stages: Sequence[CompressedStage], where: Placement, num_replicas: int) -> None:
        self._stages, self._where = stages, where
        self._tells = num_replicas > 1 and where.replica == 0
        self._words: Words | None = None
        if self._tells and where.num_processes > 1:
            timeout = timedelta(seconds=stages[0].wire.options.timeout)
            self._words = Words(where.pipeline, where.last_process, timeout)
        self._began, self._before = 0.0, [(0, 0.0)] * len(stages)

    def begin(self) -> None:
        """Say that a step begins."""
        self._began, self._before = time.perf_counter(), self._spent()
        if self._words is not None:
            self._words.expect(_WHAT)

    def end(self) -> list[StageExchanged]:
        """What each stage exchanged in the step, in the process of the last stage of the first replica; else nothing.

        Nothing if no stage exchanged. PeerError if a process is gone or silent.
        """
        if not self._tells:
            return []
        mine = [
            {"stage": stage.stage_index, "bytes": nbytes - bytes_before, "spent": seconds - seconds_before}
            | exchange_report(stage, self._where, self._began)
            for stage, (nbytes, seconds), (bytes_before, seconds_before) in zip(
                self._stages, self._spent(), self._before, strict=True
            )
        ]
        everyone: list[Any] | None = [mine]
        if self._words is not None:
            with self._stages[0].meter.section("neighbour", _WHAT, Work("exchange")):
                everyone = self._words.say(mine, _WHAT)
        if everyone is None:
            return []
        reports = sorted((report for reports in everyone for report in reports), key=lambda report: report["stage"])
        if not any(report["bytes"] or report["spent"] for report in reports):
            return []
        return [
            StageExchanged(report["stage"], report["bytes"], report["spent"], share)
            for report, share in zip(reports, hidden_shares(reports), strict=True)
        ]

    def _spent(self) -> list[tuple[int, float]]:
        """Bytes and seconds of the exchanges of each stage here so far."""
        return [(stage.meter.exchanged, sum(stage.meter.exchange.values())) for stage in self._stages]
