"""What each stage of a pipeline spent on the exchange between replicas in a step, in the process that reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.stages.compressed_stage import CompressedStage


@dataclass(frozen=True)
class StageExchanged:
    """What one stage exchanged in a step."""

    stage: int
    bytes: int
    """Bytes of the frames that it sent to other replicas and got from them."""
    seconds: float
    """Seconds of the step that the exchange took."""


class StepExchanges:
    """The exchanges of a pipeline, step by step; the first replica reports them, if there are several."""

    def __init__(self, stages: Sequence[CompressedStage], where: Placement, num_replicas: int) -> None:
        self._stages, self._tells = stages, num_replicas > 1 and where.replica == 0
        self._before = [(0, 0.0)] * len(stages)

    def begin(self) -> None:
        """Say that a step begins."""
        self._before = self._spent()

    def report(self) -> list[dict[str, Any]]:
        """What the stages here exchanged since the step began, as JSON values."""
        if not self._tells:
            return []
        return [
            {"stage": stage.stage_index, "bytes": nbytes - bytes_before, "seconds": seconds - seconds_before}
            for stage, (nbytes, seconds), (bytes_before, seconds_before) in zip(
                self._stages, self._spent(), self._before, strict=True
            )
        ]

    def _spent(self) -> list[tuple[int, float]]:
        """Bytes and seconds of the exchanges of each stage here so far."""
        return [(stage.meter.exchanged, sum(stage.meter.exchange.values())) for stage in self._stages]


def exchanged_by_stages(told: Iterable[Sequence[Mapping[str, Any]]]) -> list[StageExchanged]:
    """What each stage of a pipeline exchanged in a step, by the reports of its processes; empty if none did."""
    found = sorted((StageExchanged(**each) for reports in told for each in reports), key=lambda each: each.stage)
    return found if any(each.bytes or each.seconds for each in found) else []
