"""What a prediction answers about one workload: speeds, bandwidths needed, and the best schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.launch.timing.prediction import Prediction, best, needed_bandwidth, possible, predict_each, verdict
from thinwire.launch.timing.workload import Network, Workload, label
from thinwire.pipeline.options import CompressionOptions
from thinwire.pipeline.schedules import SCHEDULES


@dataclass(frozen=True, kw_only=True)
class Answer:
    """All answers about one workload."""

    workload: Workload
    predictions: list[Prediction]
    """With the schedule asked for, by bandwidth and codec."""
    needed: dict[str, float]
    """By codec: the bandwidth, bits a second, below which the wire is the bottleneck."""
    schedules: list[Prediction]
    """Every schedule that can run this, with every codec, at the lowest bandwidth."""
    best: Prediction | None
    """The fastest of them within the memory given; None where none fits."""
    verdicts: list[str]
    """Whether compression pays, a sentence a bandwidth."""


def answer(
    workload: Workload,
    schedule: str,
    codecs: Sequence[CompressionOptions],
    networks: Sequence[Network],
    max_in_flight: float = math.inf,
) -> Answer:
    """Ask everything about one workload. `networks` differ in bandwidth; `codecs` begin with the uncompressed one."""
    by_network = [predict_each(workload, schedule, codecs, network) for network in networks]
    slowest = min(networks, key=lambda network: network.bandwidth)
    by_schedule = [predict_each(workload, name, codecs, slowest) for name in possible(workload, SCHEDULES)]
    schedules = [prediction for row in by_schedule for prediction in row]
    return Answer(
        workload=workload,
        predictions=[prediction for row in by_network for prediction in row],
        needed={label(codec): needed_bandwidth(workload, schedule, codec, networks[0]) for codec in codecs},
        schedules=schedules,
        best=best(schedules, max_in_flight),
        verdicts=[verdict(row) for row in by_network],
    )
