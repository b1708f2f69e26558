"""How long the steps of a run would take over other links: what it measured, walked through its schedule again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thinwire.launch.report.reading import RunFiles
from thinwire.launch.shared.links import parse_bandwidth, parse_latency
from thinwire.launch.timing.step_time import ChannelTiming, Compute, time_step
from thinwire.launch.timing.timetable import timetable
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.frames import CHANNELS, ChannelName

FORWARD_SHARE = 1 / 3
"""Of a micro-batch's compute: a backward multiplies twice as often as its forward."""


@dataclass(frozen=True)
class PredictedLink:
    """What every boundary between two processes is predicted to cross."""

    name: str
    bandwidth: float
    """Bits a second."""
    latency: float
    """Seconds, one way."""


def parse_link(text: str) -> PredictedLink:
    """Parse a link such as 100mbit, or of 100mbit,20ms. OptionsError for other text."""
    rate, comma, delay = text.partition(",")
    bandwidth = parse_bandwidth(rate)
    if bandwidth == 0:
        raise OptionsError(f"--link must be faster than 0, got {text!r}")
    return PredictedLink(
        text,
        bandwidth=float("inf") if bandwidth is None else 1e6 * bandwidth,
        latency=parse_latency(delay) / 1e3 if comma else 0.0,
    )


def step_seconds(run: RunFiles, link: PredictedLink) -> float:
    """Seconds of an average step of the run with this link at every boundary, and with its own compute and codecs.

    The frames are as long as the run's were on average, and a stage's compute is spread evenly over its micro-batches.
    """
    pipeline: Mapping[str, Any] = run.fields["pipeline"]
    passes = max(1, len(run.steps)) * pipeline["accumulation"]
    microbatches = passes * pipeline["num_microbatches"]
    compute = [stage["seconds"]["compute"] / microbatches for stage in run.summary["stages"]]
    table = timetable(pipeline["schedule"], pipeline["num_stages"], pipeline["num_microbatches"])
    course = time_step(
        table,
        Compute(
            forward=[FORWARD_SHARE * seconds for seconds in compute],
            backward=[(1 - FORWARD_SHARE) * seconds for seconds in compute],
        ),
        *(_channel(run, name, link) for name in CHANNELS),
    )
    return course.seconds * int(pipeline["accumulation"])


def _channel(run: RunFiles, name: ChannelName, link: PredictedLink) -> ChannelTiming:
    rows = sorted((row for row in run.summary["channels"] if row["channel"] == name), key=lambda row: row["boundary"])
    senders, receivers = (0, 1) if name == "activations" else (1, 0)
    return ChannelTiming(
        nbytes=[row["bytes"] / max(1, row["frames"]) for row in rows],
        bandwidth=link.bandwidth,
        latency=link.latency,
        encode=[_codec_seconds(run, row["boundary"] + senders, "encode") for row in rows],
        decode=[_codec_seconds(run, row["boundary"] + receivers, "decode") for row in rows],
    )


def _codec_seconds(run: RunFiles, stage: int, section: str) -> float:
    """Seconds that a stage spent on each frame it sent (`encode`) or received (`decode`)."""
    ends = {("activations", stage), ("gradients", stage - 1)}
    if section == "decode":
        ends = {("activations", stage - 1), ("gradients", stage)}
    frames: int = sum(row["frames"] for row in run.summary["channels"] if (row["channel"], row["boundary"]) in ends)
    spent = float(run.summary["stages"][stage]["seconds"][section])
    return spent / max(1, frames)
