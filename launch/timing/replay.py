"""The time of a run's steps over other links: the schedule of the run, simulated with the times that it measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinwire.launch.shared.links import Network
from thinwire.launch.timing.step_time import ChannelTiming, Compute, time_step
from thinwire.launch.timing.timetable import timetable
from thinwire.pipeline.frames import CHANNELS, HEADER_BYTES, ChannelName
from thinwire.pipeline.options import PipelineOptions

FORWARD_SHARE = 1 / 3
"""The forward's share of the compute of a micro-batch: a backward does twice as many multiplications."""


def step_seconds(
    pipeline: PipelineOptions,
    summary: Mapping[str, Any],
    link: Network,
    *,
    compressed: bool = True,
    busy: float = 1.0,
) -> float:
    """Seconds of an average step with this link at every boundary. Compute and codecs take as long as in the run.

    Every frame of a boundary has the average length. All micro-batches of a stage take the same compute time.

    Args:
        pipeline: that of the run's recipe.
        summary: the summary of the run.
        link: the link at all boundaries between processes.
        compressed: whether the codecs of the run compress the tensors; without them, codecs take no time.
        busy: how many times as long compute and codecs took in the run as they shall here.
    """
    passes = max(1, summary["steps"]) * pipeline.accumulation
    microbatches = passes * pipeline.num_microbatches
    compute = [stage["seconds"]["compute"] / microbatches / busy for stage in summary["stages"]]
    numbers = pipeline.num_stages, pipeline.num_processes, pipeline.num_microbatches
    course = time_step(
        timetable(pipeline.schedule, *numbers),
        Compute(
            forward=[FORWARD_SHARE * seconds for seconds in compute],
            backward=[(1 - FORWARD_SHARE) * seconds for seconds in compute],
        ),
        *(_channel(summary, name, link, compressed, busy) for name in CHANNELS),
    )
    return course.seconds * pipeline.accumulation


def _channel(
    summary: Mapping[str, Any], name: ChannelName, link: Network, compressed: bool, busy: float
) -> ChannelTiming:
    rows = sorted((row for row in summary["channels"] if row["channel"] == name), key=lambda row: row["boundary"])
    if not compressed:
        frames = [HEADER_BYTES + row["uncompressed"] / max(1, row["frames"]) for row in rows]
        return ChannelTiming(nbytes=frames, bandwidth=link.bandwidth, latency=link.latency)
    senders, receivers = (0, 1) if name == "activations" else (1, 0)
    return ChannelTiming(
        nbytes=[row["bytes"] / max(1, row["frames"]) for row in rows],
        bandwidth=link.bandwidth,
        latency=link.latency,
        encode=[_codec_seconds(summary, row["boundary"] + senders, "encode") / busy for row in rows],
        decode=[_codec_seconds(summary, row["boundary"] + receivers, "decode") / busy for row in rows],
    )


def _codec_seconds(summary: Mapping[str, Any], stage: int, section: str) -> float:
    """Seconds that a stage spent on each frame it sent (`encode`) or received (`decode`)."""
    ends = {("activations", stage), ("gradients", stage - 1)}
    if section == "decode":
        ends = {("activations", stage - 1), ("gradients", stage)}
    frames: int = sum(row["frames"] for row in summary["channels"] if (row["channel"], row["boundary"]) in ends)
    spent = float(summary["stages"][stage]["seconds"][section])
    return spent / max(1, frames)
