"""The contenders of a link bench: Thinwire with some codecs, or plain torch.

All contenders of a process train copies of the same stages on the same samples, one step at a time. So they can take
turns on one link. Plain torch is PipelineStage of torch, with the same model, schedule and micro-batches, uncompressed,
with fp32 or bf16 on the wire.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.run.assembly import assemble
from thinwire.models.data.sampler import Batch
from thinwire.models.layers import Stage
from thinwire.pipeline.devices.device import CPU, put_all
from thinwire.pipeline.measuring.meters import SECTIONS, Meter
from thinwire.pipeline.options import CompressionOptions
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.schedules import build
from thinwire.pipeline.training.optimization import WholeBatchLoss, clip, make_optimizer, squared_norm

BASELINES: Mapping[str, torch.dtype] = {"torch fp32": torch.float32, "torch bf16": torch.bfloat16}
"""Plain torch.distributed.pipelining, by name: the dtype on the wire."""

UNCOMPRESSED = "none"


@dataclass(frozen=True)
class StepMeasures:
    """Measurements of one optimizer step in this process. Plain torch has none."""

    sections: dict[str, float]
    """Seconds of its stages by section; sections do not overlap."""
    forward: float
    """Mean seconds of the forward of a micro-batch through a stage of this process; of a GPU, of its launch alone."""
    sent: float
    """Bytes of all frames that its stages sent."""


class Contender(Protocol):
    """One way to train the recipe. Plain torch has no stores and no files."""

    def step(self, ids: Tensor) -> StepMeasures:
        """Take an optimizer step on the samples `ids`."""

    def forget_cache(self) -> None:
        """Drop cached copies of stores, so that the next read comes from disk."""
        return

    def close(self) -> None:
        """Delete files and free other resources."""
        return


class Thinwire(Contender):
    """The pipeline of the recipe with other codecs; stores on disk are in `folder`.

    Attributes:
        stages: those of this process.
    """

    def __init__(
        self, prepared: Prepared, where: Placement, rank: int, codecs: CompressionOptions, folder: Path
    ) -> None:
        self._folder, compression = folder, replace(codecs, store_folder=str(folder))
        self._microbatches = prepared.recipe.pipeline.num_microbatches
        recipe = replace(prepared.recipe, compression=compression)
        self._assembly = assemble(replace(prepared, recipe=recipe), where, rank)
        self._trainer = self._assembly.trainer
        self.stages = self._trainer.stages
        # every step is an epoch, and gets its batch from outside
        self._sampler: Any = SimpleNamespace(steps_per_epoch=1)
        self._trainer.sampler = self._sampler  # type: ignore[assignment]
        self._trainer.read_clocks()

    def step(self, ids: Tensor) -> StepMeasures:
        """Take an optimizer step on the samples `ids`; it is the first one again and again."""
        stages, batch = self.stages, Batch(0, ids, torch.ones(len(ids), dtype=torch.bool))
        for stage in stages:
            stage.meter.sent.clear()
        before = self._forwards()
        self._sampler.batch = lambda step: batch
        taken = self._trainer.train_step(0)
        return StepMeasures(
            sections={name: taken.sections[name] for name in SECTIONS},
            forward=(self._forwards() - before) / (len(stages) * self._microbatches),
            sent=sum(traffic.bytes for stage in stages for traffic in stage.meter.sent.values()),
        )

    def _forwards(self) -> float:
        """Seconds of all forwards so far."""
        return sum(stage.meter.computing.get("forward", 0.0) for stage in self.stages)

    def forget_cache(self) -> None:
        """Drop cached copies of stores, so that the next read comes from disk; Linux only."""
        for stage in self.stages:
            for coder in stage.ends.coders().values():
                for store in coder.buffers.stores.values():
                    store.flush()
        for path in filter(Path.is_file, self._folder.rglob("*")):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close stores and delete their files."""
        self._assembly.close()


class CastAtBoundaries(nn.Module):
    """A stage that computes in fp32 on its device, and receives and sends another dtype, from the host's memory."""

    def __init__(
        self, stage: Stage, dtype: torch.dtype, *, is_first: bool, is_last: bool, device: torch.device
    ) -> None:
        super().__init__()
        self.stage, self._dtype, self._is_first, self._is_last = stage, dtype, is_first, is_last
        self._device = device

    def forward(self, *tensors: Tensor, **side: Tensor) -> Any:
        """Cast the inputs to fp32, run the stage, and cast the outputs to the dtype of the wire."""
        here = [tensor.to(self._device) for tensor in tensors]
        arriving = here if self._is_first else [_cast(tensor, torch.float32) for tensor in here]
        leaving = self.stage(*arriving, **put_all(side, self._device))
        if self._is_last:
            return leaving
        # contiguous: torch 2.11 compares strides with those of the examples
        if isinstance(leaving, tuple):
            return tuple(_cast(tensor, self._dtype).to(CPU).contiguous() for tensor in leaving)
        return _cast(leaving, self._dtype).to(CPU).contiguous()


class PlainTorch(Contender):
    """The pipeline of torch.distributed.pipelining alone. Collective over the default process group.

    If several stages hold the same weights, each stage trains its own copy here: torch does not share them. What
    crosses a boundary comes from the host's memory, for gloo sends no other. `dtype` is that of floating-point tensors
    on the wire.
    """

    def __init__(
        self, prepared: Prepared, where: Placement, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._modules = modules = prepared.build_all(where, rank, device)
        recipe = prepared.recipe
        self._recipe, self._data, self._placement, self._device = recipe, prepared.data, where, device
        count = recipe.pipeline.num_stages
        *crossing, last = prepared.outputs
        outputs = [tuple(_example(tensor, dtype) for tensor in output) for output in crossing]
        outputs += [tuple(_example(tensor, tensor.dtype) for tensor in last)]
        inputs = [(torch.empty_like(prepared.inputs, device="cpu"),), *outputs[:-1]]
        stages = [
            PipelineStage(
                CastAtBoundaries(module, dtype, is_first=index == 0, is_last=index == count - 1, device=device),
                index,
                count,
                CPU,
                input_args=inputs[index],
                output_args=outputs[index],
            )
            for index, module in modules.items()
        ]
        self._has_first, self._has_last = 0 in modules, count - 1 in modules
        self._optimizers = {
            index: make_optimizer(module.parameters(), recipe.optimizer) for index, module in modules.items()
        }
        self._loss = WholeBatchLoss(prepared.data.task, Meter())
        self._schedule = build(recipe.pipeline.schedule, stages, recipe.pipeline.num_microbatches, self._loss)

    def step(self, ids: Tensor) -> StepMeasures:
        """Take an optimizer step on the samples `ids`, in one pass through the pipeline; nothing is measured."""
        samples = self._data.training
        args = (samples.inputs(ids, 0),) if self._has_first else ()
        kwargs: dict[str, Any] = {}
        if self._has_last:
            targets = samples.targets(ids)
            self._loss.begin(self._data.task.num_valid(targets))
            kwargs = {"target": targets.to(self._device), "losses": []}
        self._schedule.step(*args, **kwargs, **samples.side(ids))
        self._update()
        return StepMeasures({}, 0.0, 0.0)

    def _update(self) -> None:
        options = self._recipe.optimizer
        if options.max_grad_norm is not None:
            squares = {index: squared_norm(module.parameters()) for index, module in self._modules.items()}
            norm = sum(collectives.gather_numbers(self._placement, squares)) ** 0.5
            for module in self._modules.values():
                clip(module.parameters(), norm, options.max_grad_norm)
        for optimizer in self._optimizers.values():
            optimizer.step()
            optimizer.zero_grad()


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _example(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor with the shape of a meta tensor; its requires_grad shows torch whether a gradient comes back."""
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=kind, requires_grad=tensor.requires_grad)
