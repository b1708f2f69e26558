"""The answers of a prediction about one workload: speeds, needed bandwidths, and the best schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.launch.timing.network import Network
from thinwire.launch.timing.prediction import (
    Prediction,
    best,
    exchange_verdict,
    label_of,
    needed_bandwidth,
    possible,
    predict_each,
    verdict,
)
from thinwire.launch.timing.workload import Workload
from thinwire.pipeline.options import CompressionOptions
from thinwire.pipeline.schedules import SCHEDULES


@dataclass(frozen=True, kw_only=True)
class Answer:
    """All answers about one workload."""

    workload: Workload
    predictions: list[Prediction]
    """The chosen schedule at every bandwidth with every codec."""
    needed: dict[str, float]
    """By codec: the bandwidth in bits a second below which the wire is the bottleneck."""
    schedules: list[Prediction]
    """Every schedule that can run this workload, with every codec, at the lowest bandwidth."""
    best: Prediction | None
    """The fastest of `schedules` that fits in memory; None if none fits."""
    verdicts: list[str]
    """One sentence for each bandwidth: whether compression pays. With replicas one more for each: whether an exchange
    every few steps pays."""


def answer(
    workload: Workload,
    schedule: str,
    codecs: Sequence[CompressionOptions],
    networks: Sequence[Network],
    max_in_flight: float = math.inf,
    between: Sequence[str] = (),
    every: int = 1,
) -> Answer:
    """Answer all questions about one workload.

    Args:
        workload: the workload.
        schedule: the name of the chosen schedule.
        codecs: the codecs to compare; the first one is no compression.
        networks: the networks to compare, which differ in bandwidth.
        max_in_flight: the number of micro-batches that fit in the memory of a process.
        between: the codecs of gradients between replicas to compare, if there are replicas.
        every: the steps from one exchange to the next, beside every step.
    """
    workloads = [workload.exchanging(method) for method in between] or [workload]

    def row(name: str, network: Network) -> list[Prediction]:
        return [one for each in workloads for one in predict_each(each, name, codecs, network, every)]

    by_network = [row(schedule, network) for network in networks]
    slowest = min(networks, key=lambda network: network.bandwidth)
    by_schedule = [row(name, slowest) for name in possible(workload, SCHEDULES)]
    schedules = [prediction for row in by_schedule for prediction in row]
    return Answer(
        workload=workload,
        predictions=[prediction for row in by_network for prediction in row],
        needed={
            label_of(each, codec): needed_bandwidth(each, schedule, codec, networks[0])
            for each in workloads
            for codec in codecs
        },
        schedules=schedules,
        best=best(schedules, max_in_flight),
        verdicts=[*map(verdict, by_network), *(map(exchange_verdict, by_network) if workload.replicas else ())],
    )
