"""What compression gains over slower links: predicted when a run ends, from the times and bytes that it measured.

Between stages on one machine, no link is slow. So a run on one machine shows how many bytes compression saves, but not
how much time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from thinwire.launch.recipe.recipe import Recipe
from thinwire.launch.results.figures import metered_steps, unpredicted
from thinwire.launch.shared.control_groups import cores
from thinwire.launch.shared.links import Network, parse_link
from thinwire.launch.shared.rank import processes_of_host
from thinwire.launch.shared.tables import Table, Value, say, show
from thinwire.launch.timing.step_time import ChannelTiming, Compute, time_step
from thinwire.launch.timing.timetable import timetable
from thinwire.pipeline.frames import CHANNELS, HEADER_BYTES, ChannelName
from thinwire.pipeline.options import PipelineOptions

LINKS = ("1gbit", "100mbit", "10mbit")
"""Links such as in a data centre, of a fast home connection, and of a slow one."""
FEWEST_STEPS = 20
"""The least number of steps for a prediction: the first steps are slower than the average."""
PREDICTED = "predicted from the compute, codec times and bytes of this run, by its schedule; no link slowed this run"
FORWARD_SHARE = 1 / 3
"""The forward's share of the compute of a micro-batch: a backward does twice as many multiplications."""


def speeds(recipe: Recipe, summary: Mapping[str, Any]) -> Table | None:
    """Samples a second: measured, and predicted over each of `LINKS`; None if the run measured too little."""
    if not _is_measured(recipe, summary):
        return None
    measured = summary["training_seconds"] / summary["steps"]
    # the time that the schedule does not explain; it is the same over any link
    rest: float = max(0.0, measured - step_seconds(recipe.pipeline, summary, Network()))

    def speed(link: Network, compressed: bool) -> float:
        seconds = step_seconds(recipe.pipeline, summary, link, compressed=compressed) + rest
        return recipe.batch_size / seconds

    here = recipe.batch_size * summary["steps"] / max(1e-9, summary["training_seconds"])
    rows: list[list[Value]] = [["this machine, measured", here, None, None]]
    for name in LINKS:
        compressed, plain = (speed(parse_link(name), compresses) for compresses in (True, False))
        rows.append([name, compressed, plain, round(compressed / plain, 2)])
    columns = ["link", "compressed", "uncompressed", "x as fast"]
    return Table("samples/s over slower links between the stages: predicted, not measured", columns, rows)


def show_slower_links(recipe: Recipe, summary: Mapping[str, Any]) -> None:
    """Print the predicted speeds over slower links at the end of a run of several processes."""
    if dist.get_world_size() > 1 and (table := speeds(recipe, summary)):
        show([table])
        say(PREDICTED, unpredicted(summary), crowding(recipe))


def crowding(recipe: Recipe) -> str:
    """A sentence that warns about the numbers if processes shared cores; else empty."""
    processes, usable = recipe.pipeline.num_processes, cores()
    if processes * recipe.training.threads <= usable:
        return ""
    shared = f"{processes} processes shared {usable} core{'s' * (usable > 1)} here"
    return f"{shared}; on a machine each they compute faster, so slow links cost more there and compression gains more"


def _is_measured(recipe: Recipe, summary: Mapping[str, Any]) -> bool:
    """Whether compressed frames went between processes of one machine, in enough steps."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    return (
        1 < processes == processes_of_host()
        and recipe.replicas.count == 1
        and metered_steps(summary) >= FEWEST_STEPS
        and any(channel["codec"] != "none" for channel in summary["channels"])
    )


def step_seconds(
    pipeline: PipelineOptions, summary: Mapping[str, Any], link: Network, *, compressed: bool = True, busy: float = 1.0
) -> float:
    """Seconds of an average step with this link at every boundary. Compute and codecs take as long as in the run.

    Every frame of a boundary has the average length. All micro-batches of a stage take the same compute time. Codecs
    take no time if not `compressed`. In the run, compute and codecs took `busy` times as long.
    """
    passes = max(1, metered_steps(summary)) * pipeline.accumulation
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
