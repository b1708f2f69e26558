"""The summary of a run: its times, and one report for each stage, gathered by the process of the last stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from typing import Any, Literal, get_args

from thinwire.compress import Method
from thinwire.launch.recipe.recipe import Recipe
from thinwire.models.digest import tensor_lines, weights_digest
from thinwire.pipeline.devices.device import described
from thinwire.pipeline.devices.memory import peak_memory, peak_on_gpu
from thinwire.pipeline.frames import CHANNELS, EXCHANGE, PHASES, SHARED, ChannelName
from thinwire.pipeline.measuring.meters import Route, Traffic, count
from thinwire.pipeline.saving.state import module_of
from thinwire.pipeline.stages.compressed_stage import CompressedStage

Activity = Literal["training", "evaluation", "saving"]


class Times:
    """The seconds of a run in one process by activity.

    Args:
        before: the `state_dict` of the run that this one goes on from; empty for a new run.

    Attributes:
        seconds: seconds of each activity; `training` is optimizer steps alone.
    """

    def __init__(self, before: Mapping[str, float]) -> None:
        self.seconds: dict[Activity, float] = {
            purpose: float(before.get(purpose, 0.0)) for purpose in get_args(Activity)
        }
        self._started = time.perf_counter() - float(before.get("all", 0.0))

    @property
    def all(self) -> float:
        """Seconds since the run began, with the time between activities."""
        return time.perf_counter() - self._started

    @contextmanager
    def spent_on(self, purpose: Activity) -> Iterator[None]:
        """Add the time of the code inside to an activity."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[purpose] += time.perf_counter() - started

    def state_dict(self) -> dict[str, float]:
        """The seconds so far, as JSON values."""
        return {**{str(purpose): spent for purpose, spent in self.seconds.items()}, "all": self.all}


def stage_report(stage: CompressedStage) -> dict[str, Any]:
    """The report of one stage: size, seconds, traffic, device, peak memory of its process, digests, its exchange."""
    return {
        "stage": stage.stage_index,
        "layers": len(module_of(stage).layers),
        "parameters": sum(parameter.numel() for parameter in stage.submod.parameters()),
        "seconds": dict(stage.meter.seconds),
        "traffic": [(route, asdict(traffic)) for route, traffic in stage.meter.sent.items()],
        "device": described(stage.device),
        "peak_on_gpu": peak_on_gpu(stage.device),
        "peak_memory": peak_memory(),
        "digest_lines": tensor_lines(module_of(stage).saved_state()),
        "exchange": dict(stage.meter.exchange),
    }


def carried(reported: Iterable[Iterable[tuple[Route, Mapping[str, int]]]]) -> dict[Route, Traffic]:
    """The traffic of each route over all stages that reported it, of all replicas."""
    total: dict[Route, Traffic] = {}
    for (boundary, channel, phase), traffic in chain.from_iterable(reported):
        count(total, (boundary, channel, phase), Traffic(**traffic))
    return total


def of_stages(recipe: Recipe, stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a summary says of the reports of all stages, each with that of its exchange: traffic, time, weights."""
    several = recipe.replicas.count > 1
    sent = carried(stage["traffic"] for stage in stages)
    by_phase = {phase: sum((each for route, each in sent.items() if route[2] == phase), Traffic()) for phase in PHASES}
    gathered = ("digest_lines", "traffic", *(() if several else ("exchange",)))
    rows = [{name: value for name, value in stage.items() if name not in gathered} for stage in stages]
    return {
        "channels": channel_rows(sent, recipe.num_boundaries, recipe.compression.method),
        "replicas": weights_rows(sent, len(stages), EXCHANGE, str(recipe.replicas.method)) if several else [],
        "shared": weights_rows(sent, len(stages), SHARED, recipe.compression.shared),
        "stages": rows,
        "weights_digest": weights_digest(line for stage in stages for line in stage["digest_lines"]),
        "traffic": {phase: asdict(traffic) for phase, traffic in by_phase.items()},
        "bytes_sent": sum(traffic.bytes for traffic in sent.values()),
    }


def channel_rows(
    sent: Mapping[Route, Traffic], num_boundaries: int, codec_of: Callable[[int, ChannelName], Method]
) -> list[dict[str, Any]]:
    """The traffic of training, without evaluations: one row for each boundary and channel."""
    rows = []
    for boundary in range(num_boundaries):
        for channel in CHANNELS:
            traffic = sent.get((boundary, channel, "train"), Traffic())
            rows.append(
                {
                    "boundary": boundary,
                    "channel": channel,
                    "codec": str(codec_of(boundary, channel)),
                    **asdict(traffic),
                    "bits_per_element": traffic.bits_per_element,
                    "full_share": traffic.full_rows / max(1, traffic.rows),
                }
            )
    return rows


def weights_rows(
    sent: Mapping[Route, Traffic], num_stages: int, channels: Sequence[ChannelName], codec: str
) -> list[dict[str, Any]]:
    """The gradients of weights that replicas, or stages that hold the same, sent: a row for each stage and channel.

    There is none for sums if every replica adds up for itself, and one for running statistics if there are any.
    """
    return [
        {
            "stage": stage,
            "channel": channel,
            "codec": "none" if channel == "statistics" else codec,
            **{name: value for name, value in asdict(traffic).items() if name in ("frames", "bytes", "uncompressed")},
            "bits_per_element": traffic.bits_per_element,
        }
        for stage in range(num_stages)
        for channel in channels
        for traffic in [sent.get((stage, channel, "train"), Traffic())]
        if traffic.frames or channel == "parts"
    ]
