"""The numbers of one run, for tables and pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from thinwire.launch.report.reading import RunFiles
from thinwire.launch.shared.strict_json import with_nan
from thinwire.pipeline.frames import CHANNELS

Points = list[tuple[float, float]]


def speed(run: RunFiles) -> float:
    """Samples a second in training steps, without the time of evaluations and saves."""
    samples: int = sum(step["samples"] for step in run.steps)
    return samples / max(1e-9, math.fsum(float(step["seconds"]) for step in run.steps))


def ratio(channels: Sequence[Mapping[str, Any]]) -> float:
    """Bytes of the uncompressed tensors over bytes sent."""
    sent = training_bytes(channels)
    uncompressed: int = sum(channel["uncompressed"] for channel in channels)
    return uncompressed / sent if sent else 1.0


def training_bytes(channels: Sequence[Mapping[str, Any]]) -> int:
    """Bytes of all training frames, headers included."""
    return sum(channel["bytes"] for channel in channels)


def codecs(run: RunFiles) -> str:
    """The codecs of activations and gradients; a comma joins several codecs of one channel."""
    found = [", ".join(dict.fromkeys(row["codec"] for row in _rows(run, channel))) for channel in CHANNELS]
    return "/".join(dict.fromkeys(found)) or "none"


def is_uncompressed(run: RunFiles) -> bool:
    """Whether no channel compressed anything."""
    return all(row["codec"] == "none" for row in run.summary["channels"])


def bits(run: RunFiles, channel: str) -> float | None:
    """Bits for each element on the wire, over all boundaries; None if nothing crossed."""
    rows = _rows(run, channel)
    elements: int = sum(row["elements"] for row in rows)
    return 8 * training_bytes(rows) / elements if elements else None


def score(run: RunFiles, mode: str, name: str = "loss") -> float | None:
    """The last held-out score of that name; None if the run has no such score."""
    found: float | None = run.summary["held_out"].get(mode, {}).get(name)
    return found


def progress_in_steps(run: RunFiles) -> list[float]:
    """The number of steps done: 0 at the start, then the number after each step."""
    return [0.0, *(step["step"] + 1.0 for step in run.steps)]


def progress_in_seconds(run: RunFiles) -> list[float]:
    """Seconds of training: 0 at the start, then the sum after each step. Evaluations do not count."""
    return [*accumulate((float(step["seconds"]) for step in run.steps), initial=0.0)]


def progress_in_megabytes(run: RunFiles) -> list[float]:
    """MB that all boundaries have sent: 0 at the start, then the sum after each step.

    Beside other replicas the log of steps counts the bytes of the first one, so they are scaled to those of all.
    """
    seen = [float(step["bytes"]) for step in run.steps]
    counted = math.fsum(seen[: run.summary["steps"]])  # a killed run may have logged steps after its last summary
    scale = training_bytes(run.summary["channels"]) / max(1.0, counted) / 1e6
    return [*accumulate((scale * count for count in seen), initial=0.0)]


def losses(run: RunFiles, progress: Sequence[float] | None = None) -> Points:
    """Points (progress after a step, training loss of the step); progress is in steps by default."""
    places = progress or progress_in_steps(run)
    return [(places[i + 1], with_nan(step["loss"])) for i, step in enumerate(run.steps)]


def held_out_losses(run: RunFiles, mode: str, progress: Sequence[float] | None = None) -> Points:
    """Points (progress at an evaluation, its held-out loss); progress is in steps by default."""
    places = progress or progress_in_steps(run)
    scored = [line for line in run.evaluations if mode in line]
    return [(places[min(line["step"], len(places) - 1)], with_nan(line[mode]["loss"])) for line in scored]


def _rows(run: RunFiles, channel: str) -> list[Mapping[str, Any]]:
    return [row for row in run.summary["channels"] if row["channel"] == channel]
