"""What is compared over a link: Thinwire with some codecs, or plain torch, each taking the same optimizer steps.

All contenders of a process train copies of the same stages on the same samples, a step at a time, so that they can take
turns on one link.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from thinwire.launch.bench.links.plain_torch import PlainPipeline
from thinwire.launch.run.assembly import Prepared, assemble, build_modules
from thinwire.models.data.sampler import Batch
from thinwire.pipeline.options import CompressionOptions
from thinwire.pipeline.process import Placement
from thinwire.pipeline.tracing.spans import Recording

BASELINES: Mapping[str, torch.dtype] = {"torch fp32": torch.float32, "torch bf16": torch.bfloat16}
"""Plain torch.distributed.pipelining, by what is on the wire."""


@dataclass(frozen=True)
class Codecs:
    """The codecs of both channels, as expressions."""

    activations: str
    gradients: str


@dataclass(frozen=True)
class StepMeasures:
    """Measurements of one optimizer step in this process. Plain torch has none."""

    sections: dict[str, float]
    """Exclusive seconds of its stages, by section."""
    compute: list[tuple[int, str, float]]
    """Stage, task, seconds: of one micro-batch, or of the optimizer."""
    frames: list[tuple[int, str, int, int]]
    """Boundary, channel, frames, bytes: what its stages sent."""


class Contender(Protocol):
    """Something that trains."""

    def step(self, ids: Tensor) -> StepMeasures:
        """Take an optimizer step on the samples `ids`."""

    def forget_cache(self) -> None:
        """Drop cached copies of stores, so that the next read comes from disk."""

    def close(self) -> None:
        """Delete files and free other resources."""


class _Given:
    """A sampler that is told its next batch."""

    def __init__(self) -> None:
        self.ids = torch.empty(0, dtype=torch.int64)

    def batch(self, step: int) -> Batch:
        """The batch, in the first epoch always."""
        return Batch(0, self.ids, torch.ones(len(self.ids), dtype=torch.bool))


class Thinwire:
    """The recipe's pipeline with other codecs; stores on disk keep their files in `folder`."""

    def __init__(self, prepared: Prepared, where: Placement, rank: int, codecs: Codecs, folder: Path) -> None:
        compression = CompressionOptions(
            activations=codecs.activations, gradients=codecs.gradients, store_folder=str(folder)
        )
        recipe = replace(prepared.recipe, compression=compression)
        self._trainer = assemble(replace(prepared, recipe=recipe), where, rank).trainer
        self._trainer.sampler = self._sampler = _Given()
        self._trainer.read_clocks()

    def step(self, ids: Tensor) -> StepMeasures:
        """Take an optimizer step on the samples `ids`."""
        stages, self._sampler.ids = self._trainer.stages, ids
        recordings = {stage.stage_index: Recording() for stage in stages}
        for stage in stages:
            stage.meter.recording = recordings[stage.stage_index]
            stage.meter.sent.clear()
        record = self._trainer.train_step(0)
        for stage in stages:
            stage.meter.recording = None
        return StepMeasures(
            sections={name: float(seconds) for name, seconds in record.sections.items()},
            compute=[
                (stage, task, seconds)
                for stage, recording in recordings.items()
                for task, seconds in _computed(recording).items()
            ],
            frames=[
                (boundary, channel, traffic.frames, traffic.bytes)
                for stage in stages
                for (boundary, channel, _), traffic in stage.meter.sent.items()
            ],
        )

    def forget_cache(self) -> None:
        """Drop cached copies of stores, so that the next read comes from disk."""
        for stage in self._trainer.stages:
            stage.ends.drop_cache()

    def close(self) -> None:
        """Close stores and delete their files."""
        for stage in self._trainer.stages:
            stage.close()
        self._trainer.stages[0].wire.discard_stores()


class PlainTorch:
    """Torch's own pipeline, with a dtype on the wire."""

    def __init__(self, prepared: Prepared, where: Placement, rank: int, dtype: torch.dtype) -> None:
        self._pipeline = PlainPipeline(prepared, build_modules(prepared, where, rank), where, dtype)

    def step(self, ids: Tensor) -> StepMeasures:
        """Take an optimizer step on the samples `ids`."""
        self._pipeline.step(ids)
        return StepMeasures({}, [], [])

    def forget_cache(self) -> None:
        """There is nothing to forget."""

    def close(self) -> None:
        """There is nothing to close."""


def make(name: str, codecs: Codecs | None, prepared: Prepared, where: Placement, rank: int, folder: Path) -> Contender:
    """The contender of a name: with codecs Thinwire, without them one of BASELINES. Collective over all processes."""
    if codecs is None:
        return PlainTorch(prepared, where, rank, BASELINES[name])
    return Thinwire(prepared, where, rank, codecs, folder)


def _computed(recording: Recording) -> dict[str, float]:
    """Seconds of one micro-batch by task, medians over the step; the optimizer's once."""
    durations: dict[tuple[str, int | None], float] = defaultdict(float)
    for span in recording.spans:
        if span.kind == "compute":
            durations[span.task, span.microbatch] += span.end - span.start
    by_task: dict[str, list[float]] = defaultdict(list)
    for (task, _), seconds in durations.items():
        by_task[task].append(seconds)
    return {task: statistics.median(seconds) for task, seconds in by_task.items()}
