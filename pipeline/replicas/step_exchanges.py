"""What each stage of a pipeline spent on the exchange between replicas in a step, in the process that reports.

A stage begins to exchange when its last backward is done, while earlier stages still compute:

    stage 0   | backward | backward | backward | exchange |
    stage 1   | backward | backward | exchange ----- |
    stage 2   | backward | exchange ----- |
                                               ^ the last stage to begin ends the drain

What lies before that moment is hidden: the drain of the pipeline hid it. Each process knows the times of its own stages
by its own clock, so they are put on one clock before they are compared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

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
    hidden: float | None
    """The share hidden of the exchanges that ended in this step; None if none did, or if it is not known."""


class StepExchanges:
    """The exchanges of a pipeline, step by step; the first replica reports them, if there are several."""

    def __init__(self, stages: Sequence[CompressedStage], where: Placement, num_replicas: int) -> None:
        self._stages, self._where = stages, where
        self._tells = num_replicas > 1 and where.replica == 0
        self._began, self._before = 0.0, [(0, 0.0)] * len(stages)

    def begin(self) -> None:
        """Say that a step begins."""
        self._began, self._before = time.perf_counter(), self._spent()

    def report(self) -> list[dict[str, Any]]:
        """What the stages here exchanged since the step began, as JSON values."""
        if not self._tells:
            return []
        return [
            {"stage": stage.stage_index, "bytes": nbytes - bytes_before, "seconds": seconds - seconds_before}
            | last_exchanges(stage, self._where, self._began)
            for stage, (nbytes, seconds), (bytes_before, seconds_before) in zip(
                self._stages, self._spent(), self._before, strict=True
            )
        ]

    def _spent(self) -> list[tuple[int, float]]:
        """Bytes and seconds of the exchanges of each stage here so far."""
        return [(stage.meter.exchanged, sum(stage.meter.exchange.values())) for stage in self._stages]


def exchanged_by_stages(told: Iterable[Sequence[Mapping[str, Any]]]) -> list[StageExchanged]:
    """What each stage of a pipeline exchanged in a step, by the reports of its processes; empty if none did."""
    reports = sorted((each for reports in told for each in reports), key=lambda each: each["stage"])
    if not any(report["bytes"] or report["seconds"] for report in reports):
        return []
    return [
        StageExchanged(report["stage"], report["bytes"], report["seconds"], share)
        for report, share in zip(reports, hidden_shares(reports), strict=True)
    ]


Moments = Sequence[tuple[float, float]]
"""When each of the last exchanges of a stage began and ended."""


def exchange_report(stage: CompressedStage, where: Placement) -> dict[str, Any]:
    """The exchange of one stage, as JSON values: seconds by section, and what `last_exchanges` says."""
    return {"seconds": dict(stage.meter.exchange), **last_exchanges(stage, where)}


def last_exchanges(stage: CompressedStage, where: Placement, since: float = -math.inf) -> dict[str, Any]:
    """When the last exchanges of one stage began and ended, and the clock of the next stage, as JSON values.

    Only those that ended after `since`, a time of this process's clock. None in a simulation, where replicas and stages
    take turns.
    """
    meter, index = stage.meter, stage.stage_index
    apart = where.num_replicas > 1
    ended = [place for place, (_, end) in enumerate(meter.exchanges) if apart and end >= since]
    following = where.process_of.get(index + 1, dist.get_rank())
    same = following == dist.get_rank()
    return {
        "last": [meter.exchanges[place] for place in ended],
        "next_clock": (1.0, 0.0) if same else stage.wire.clocks.line(following),
    }


def reported(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By stage: seconds of its exchange in each section, and `hidden`, the share hidden of the last ones.

    `hidden` is None if it is not known. Takes the reports of all stages, in order.
    """
    shares = hidden_shares(reports)
    return [{**report["seconds"], "hidden": share} for report, share in zip(reports, shares, strict=True)]


def hidden_shares(reports: Sequence[Mapping[str, Any]]) -> Sequence[float | None]:
    """By stage, the share hidden of the last exchanges; None if it is not known. Takes the reports of all stages."""
    if all(report["last"] and report["next_clock"] for report in reports):
        return hidden(_on_one_clock(reports))
    return [None] * len(reports)


def hidden(times: Sequence[Moments]) -> list[float]:
    """The share of each stage's exchanges that lies before the last stage began its own; all times are by one clock."""
    drained = [max(begun for begun, _ in step) for step in zip(*times, strict=True)]
    shares = []
    for exchanges in times:
        before = sum(min(ended, end) - begun for (begun, ended), end in zip(exchanges, drained, strict=True))
        shares.append(before / max(1e-9, sum(ended - begun for begun, ended in exchanges)))
    return shares


def _on_one_clock(reports: Sequence[Mapping[str, Any]]) -> list[Moments]:
    """The times of all stages by the clock of the last one."""
    times: list[Moments] = []
    scale, shift = 1.0, 0.0
    for report in reversed(reports):
        rate, offset = report["next_clock"]
        scale, shift = scale * rate, scale * offset + shift
        times.append([(scale * begun + shift, scale * ended + shift) for begun, ended in report["last"]])
    return times[::-1]
