"""What of the exchange between replicas the drain of the pipeline hid, by stage.

A stage begins to exchange when its last backward is done, while earlier stages still compute:

    stage 0   | backward | backward | backward | exchange |
    stage 1   | backward | backward | exchange ----- |
    stage 2   | backward | exchange ----- |
                                               ^ the last stage to begin ends the drain

What lies before that moment is hidden.
Each process knows the times of its own stages by its own clock, so they are put on one clock before they are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.stage import CompressedStage

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


def told(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
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
