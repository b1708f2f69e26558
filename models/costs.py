"""The cost of each layer in time and memory. A cut is chosen by these costs.

Layers are built, measured and released one at a time. Each runs on the outputs of the layer before. So a model can be
larger than the memory of the machine, if each layer fits.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from thinwire.models.large_weights import added_in_place
from thinwire.models.layers import Blueprint, Stage, build_stage, stage_output_examples
from thinwire.models.precision import NARROW, Precision
from thinwire.models.recompute import Recompute
from thinwire.models.tensors import as_tuple

_WARMUP, _REPETITIONS = 2, 5
"""Runs of each layer before those that are timed, and those."""


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """The cost of one layer for one micro-batch."""

    name: str
    """The layer's name."""
    forward: float
    """Seconds."""
    backward: float
    """The same, for the gradients of parameters and inputs."""
    parameter_bytes: int
    """Bytes of the parameters. Gradients of what trains take as many again, and so does each moment of an optimizer."""
    activation_bytes: int
    """Bytes held from forward to backward: the inputs, and all else that the backward needs. Parameters, buffers and
    outputs do not count; the outputs are the next layer's inputs. A layer that is computed again holds its inputs."""
    output_bytes: int
    """Bytes of the outputs. They cross the wire, without compression, if the model is cut after this layer."""
    frozen_bytes: int = 0
    """Bytes of the parameters that do not train."""
    working_bytes: int = 0
    """Bytes that a micro-batch takes beside all these while it is computed: the gradient of the largest parameter that
    trains, before it is added to those of others, if it is not added in place; the outputs of a last layer and their
    gradient; and what a layer that is computed again holds until then. A stage takes those of one layer at a time."""

    @property
    def compute(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    def memory(self, *, parameter_copies: int, microbatches: int) -> int:
        """The bytes that the layer adds to a stage that trains.

        Args:
            parameter_copies: tensors of the parameters' size: parameters, gradients, moments; 4 with AdamW.
            microbatches: the most micro-batches that wait for their backward at one time: all of a step with GPipe,
                at most the number of stages with 1F1B.
        """
        trained = self.parameter_bytes - self.frozen_bytes
        return self.frozen_bytes + parameter_copies * trained + microbatches * self.activation_bytes


def measure(
    blueprint: Blueprint,
    example_input: Tensor,
    *,
    seed: int = 0,
    precision: Precision = "fp32",
    recompute: Recompute = "none",
    device: torch.device | str = "cpu",
    side: Mapping[str, Tensor] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> tuple[LayerCost, ...]:
    """Time the forward and backward of every layer on this machine, as in training, and take the medians.

    Args:
        blueprint: the model.
        example_input: one micro-batch of the model's input.
        seed, precision, recompute, device: as for `build_stage`.
        side: real side inputs of the micro-batch, by name.
        loss: of the outputs of the last layer, whose time counts with that layer's.
    """
    side_inputs = {name: tensor.to(device) for name, tensor in (side or {}).items()}
    inputs: tuple[Tensor, ...] = (example_input.to(device),)
    costs = []
    # dropout draws random numbers
    gpus = [] if torch.device(device).type == "cpu" else [device]
    with torch.random.fork_rng(devices=gpus), torch.enable_grad():
        torch.manual_seed(seed)
        for index, spec in enumerate(blueprint.layers):
            alone = range(index, index + 1)
            stage = build_stage(blueprint, alone, seed=seed, precision=precision, recompute=recompute, device=device)
            run = partial(stage, *inputs, **side_inputs)
            stage.recompute = "none"
            _, held = _run_and_watch(stage, run, inputs)
            stage.recompute = recompute
            outputs, kept = _run_and_watch(stage, run, inputs)
            timed = run if loss is None or index + 1 < len(blueprint.layers) else partial(_lost, run, loss)
            trials = [time_once(timed) for _ in range(_WARMUP + _REPETITIONS)][_WARMUP:]
            costs.append(
                LayerCost(
                    name=spec.name,
                    forward=statistics.median(forward for forward, _ in trials),
                    backward=statistics.median(backward for _, backward in trials),
                    parameter_bytes=_nbytes(stage.parameters()),
                    activation_bytes=kept,
                    output_bytes=_nbytes(outputs),
                    frozen_bytes=_nbytes(each for each in stage.parameters() if not each.requires_grad),
                    working_bytes=held - kept + 2 * _nbytes(outputs) + _largest(stage),
                )
            )
            inputs = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs)
            # free this layer before the next is built
            del stage, run, timed, outputs
    return tuple(costs)


def operations(
    blueprint: Blueprint, example_input: Tensor, precision: Precision = "fp32", side: Mapping[str, Tensor] | None = None
) -> tuple[float, ...]:
    """The forward cost of each layer, computed without running it: the same in every process.

    It is `LayerSpec.cost` if the blueprint has counted costs. Else it is the sum of the multiplications and additions
    of matrix products, the elements of the outputs, and the parameters. Parameters count because their gradients are
    written whole: an embedding has no products, but is not free. The others are of one micro-batch, as for
    `stage_output_examples`.
    """
    if blueprint.counted:
        return tuple(layer.cost for layer in blueprint.layers)
    from torch.utils.flop_counter import FlopCounterMode

    alone = [range(index, index + 1) for index in range(len(blueprint.layers))]
    counters = [FlopCounterMode(display=False) for _ in alone]
    outputs = stage_output_examples(blueprint, alone, example_input, precision, side, around=counters.__getitem__)
    return tuple(
        float(counter.get_total_flops()) + sum(tensor.numel() for tensor in given) + layer.cost
        for counter, given, layer in zip(counters, outputs, blueprint.layers, strict=True)
    )


def _lost(run: Callable[[], Any], loss: Callable[[Any], Tensor]) -> Tensor:
    return loss(run())


def _run_and_watch(
    stage: Stage, run: Callable[[], Tensor | tuple[Tensor, ...]], inputs: Iterable[Tensor]
) -> tuple[tuple[Tensor, ...], int]:
    """The outputs, and the bytes that the layer holds for its backward."""
    held = dict(map(_storage, inputs))

    def keep(tensor: Tensor) -> Tensor:
        storage, nbytes = _storage(tensor)
        held[storage] = nbytes
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = as_tuple(run())
    elsewhere = {storage for storage, _ in map(_storage, (*stage.parameters(), *stage.buffers(), *outputs))}
    return outputs, sum(nbytes for storage, nbytes in held.items() if storage not in elsewhere)


def time_once(run: Callable[[], Tensor | tuple[Tensor, ...]]) -> tuple[float, float]:
    """The seconds of one forward and of its backward."""
    start = time.perf_counter()
    outputs = [tensor for tensor in as_tuple(run()) if tensor.requires_grad]
    _wait(outputs)
    forward = time.perf_counter() - start
    if not outputs:
        return forward, 0.0
    gradients = [torch.ones_like(tensor) for tensor in outputs]
    _wait(gradients)
    start = time.perf_counter()
    torch.autograd.backward(outputs, gradients)
    _wait(gradients)
    return forward, time.perf_counter() - start


def _wait(tensors: list[Tensor]) -> None:
    if tensors and tensors[0].device.type != "cpu":
        torch.accelerator.synchronize(tensors[0].device)


def _storage(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _largest(stage: Stage) -> int:
    """Bytes of the largest parameter that trains and whose gradient is not added up in place."""
    in_place = added_in_place(stage, NARROW.get(stage.precision, stage.weights_dtype))
    return max((each.nbytes for each in stage.parameters() if each.requires_grad and each not in in_place), default=0)
