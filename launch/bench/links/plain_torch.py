"""The pipeline without Thinwire: PipelineStage of torch, with the same model, schedule and micro-batches.

It is uncompressed, with fp32 or bf16 on the wire. It runs in the same processes and over the same links as Thinwire.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from thinwire.launch.run.assembly import Prepared
from thinwire.models.layers import Stage
from thinwire.pipeline.devices.device import CPU, put_all
from thinwire.pipeline.measuring.meters import Meter
from thinwire.pipeline.optimization import WholeBatchLoss, clip, make_optimizer, squared_norm
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.schedules import build


class CastAtBoundaries(nn.Module):
    """A stage that computes in fp32 on its device, and receives and sends another dtype, from the host's memory."""

    def __init__(
        self, stage: Stage, dtype: torch.dtype, *, is_first: bool, is_last: bool, device: torch.device = CPU
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


class PlainPipeline:
    """The stages of this process on plain torch.distributed.pipelining. Collective over the default process group.

    If several stages hold the same weights, each stage trains its own copy here: torch does not share them.

    Args:
        prepared: the recipe, and the tensors at its boundaries.
        modules: stage -> its module, on the device.
        where: the process of each stage.
        dtype: the dtype of floating-point tensors on the wire.
        device: where the stages compute; what crosses a boundary comes from the host's memory, for gloo sends no other.
    """

    def __init__(
        self,
        prepared: Prepared,
        modules: dict[int, Stage],
        where: Placement,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> None:
        recipe = prepared.recipe
        self._recipe, self._data, self._placement, self._device = recipe, prepared.data, where, device
        count = recipe.pipeline.num_stages
        *crossing, last = prepared.outputs
        outputs = [tuple(_example(tensor, dtype) for tensor in output) for output in crossing]
        outputs += [tuple(_example(tensor, tensor.dtype) for tensor in last)]
        inputs = [(torch.empty_like(prepared.inputs, device="cpu"),), *outputs[:-1]]
        self.stages = [
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
        self.has_first, self.has_last = 0 in modules, count - 1 in modules
        self._optimizers = {
            index: make_optimizer(module.parameters(), recipe.optimizer) for index, module in modules.items()
        }
        self._modules = modules
        self._loss = WholeBatchLoss(prepared.data.task, Meter(), prepared.recipe.training.label_smoothing)
        self._schedule = build(recipe.pipeline.schedule, self.stages, recipe.pipeline.num_microbatches, self._loss)

    def step(self, ids: Tensor) -> None:
        """Take an optimizer step on the samples `ids`, in one pass through the pipeline."""
        samples = self._data.training
        args = (samples.inputs(ids, 0),) if self.has_first else ()
        kwargs: dict[str, Any] = {}
        if self.has_last:
            targets = samples.targets(ids)
            self._loss.begin(self._data.task.num_valid(targets))
            kwargs = {"target": targets.to(self._device), "losses": []}
        self._schedule.step(*args, **kwargs, **samples.side(ids))
        self._update()

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
