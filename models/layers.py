"""A model as a list of layers that a pipeline may cut anywhere between: the shape every model here takes.

A stage builds only its own layers, yet starts with the values the unsplit model would have: each module is filled from
the seed and its full name alone, so neither the cut nor the order of building can matter. Names are those of the
unsplit model everywhere, so that checkpoints and digests of any cut can be compared.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from thinwire.models.errors import ModelError, require
from thinwire.models.seed import derive_seed

Precision = Literal["fp32", "bf16"]
Initialize = Callable[[str, nn.Module], None]


class Layer(nn.Module):
    """One piece of a model that is never cut: tensors in, a tensor or a tuple of tensors out.

    A subclass sets `parts` in its constructor: the full name in the unsplit model ("transformer.h.3") of each module it
    holds, "" for the unsplit model itself. Every parameter and buffer belongs to a part.
    """

    parts: dict[str, nn.Module]

    def full_state(self) -> dict[str, Tensor]:
        """Return the parameters and persistent buffers by full name; they share memory with the layer."""
        return {
            _join(full_name, name): tensor
            for full_name, part in self.parts.items()
            for name, tensor in part.state_dict().items()
        }


@dataclass(frozen=True)
class LayerSpec:
    """A layer that may be built, and what is known of it before it is."""

    name: str
    """What people call the layer: "block 3"."""
    build: Callable[[], Layer]
    """Makes the layer on the CPU; what its constructor puts into parameters is replaced, its buffers are kept."""
    cost: float = 1.0
    """The layer's share of the compute, in any unit common to the model."""


@dataclass(frozen=True)
class Blueprint:
    """A model that nobody has built yet."""

    layers: tuple[LayerSpec, ...]
    """The layers, first to last: the outputs of one are the inputs of the next."""
    initialize: Initialize
    """Fills the parameters that a module itself holds (its children get calls of their own), given the module's full
    name; draws from torch's default CPU generator only."""

    def __post_init__(self) -> None:
        require((len(self.layers) > 0, "a model must have at least one layer, got none"))


class Stage(nn.Module):
    """Consecutive layers as one module, computed in one precision."""

    def __init__(self, layers: Sequence[Layer], precision: Precision = "fp32") -> None:
        super().__init__()
        known = get_args(Precision)
        names = [full_name for layer in layers for full_name in layer.parts]
        twice = sorted({name for name in names if names.count(name) > 1})
        require(
            (precision in known, f"precision must be one of {', '.join(known)}, got {precision!r}"),
            (not twice, f"no two parts may share a name, got {', '.join(twice)} more than once"),
        )
        self.layers = nn.ModuleList(layers)
        self.precision = precision

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the layers in order; a layer's outputs, one or many, are the next layer's arguments."""
        result: Tensor | tuple[Tensor, ...] = tensors
        with self._arithmetic(tensors[0].device.type):
            for layer in self.layers:
                result = layer(*_as_tuple(result))
        return result

    def _arithmetic(self, device_type: str) -> AbstractContextManager[Any]:
        return torch.autocast(device_type, dtype=torch.bfloat16) if self.precision == "bf16" else nullcontext()

    def full_state(self) -> dict[str, Tensor]:
        """Return the parameters and persistent buffers by full name; they share memory with the stage."""
        state: dict[str, Tensor] = {}
        for layer in self.layers:
            assert isinstance(layer, Layer)
            state |= layer.full_state()
        return state

    def load_full_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy in values by full name. `state` may hold the whole model's: what belongs to other stages is left alone.

        Raises:
            ModelError: with every name that is missing, or has another shape or dtype; nothing is copied then.
        """
        own = self.full_state()
        mistakes = [mistake for name, tensor in own.items() if (mistake := _misfit(name, tensor, state.get(name)))]
        if mistakes:
            raise ModelError(f"the state does not fit this stage: {'; '.join(mistakes)}")
        for name, tensor in own.items():
            tensor.copy_(state[name])


def build_stage(
    blueprint: Blueprint,
    layers: range,
    *,
    seed: int,
    precision: Precision = "fp32",
    device: torch.device | str = "cpu",
) -> Stage:
    """Build some of the model's layers, with values that depend on the seed and each module's full name alone.

    The values are drawn on the CPU, whatever `device` the stage ends on, and torch's generators are left as they were.

    Raises:
        ModelError: if there are no such layers, or the blueprint names or fills its modules incompletely.
    """
    count = len(blueprint.layers)
    require(
        (len(layers) > 0, f"a stage must have at least one layer, got {layers}"),
        (set(layers) <= set(range(count)), f"layers must lie in 0..{count - 1}, got {layers}"),
    )
    built = [_build_layer(blueprint.layers[index], blueprint.initialize, seed) for index in layers]
    return Stage(built, precision).to(device)


def stage_output_examples(
    blueprint: Blueprint, cuts: Sequence[range], example_input: Tensor, precision: Precision
) -> list[tuple[Tensor, ...]]:
    """Return each stage's output as meta tensors: shape, dtype, and requires_grad where gradients flow.

    Nothing is allocated or computed: the layers run on tensors without data. `example_input` is one micro-batch of the
    model's input, of which only shape, dtype and device are read (a meta tensor stands for one on the CPU).
    """
    device = torch.device("cpu") if example_input.is_meta else example_input.device
    described = []
    with FakeTensorMode(), torch.enable_grad(), torch.device(device):
        tensors: tuple[Tensor, ...] = (torch.empty(example_input.shape, dtype=example_input.dtype),)
        for cut in cuts:
            stage = Stage([blueprint.layers[index].build() for index in cut], precision)
            tensors = _as_tuple(stage(*tensors))
            described.append([(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors])
    return [
        tuple(
            torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)
            for shape, dtype, requires_grad in output
        )
        for output in described
    ]


def _build_layer(spec: LayerSpec, initialize: Initialize, seed: int) -> Layer:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(derive_seed(seed, spec.name))
        # not on the meta device, which would lose the values of buffers
        with torch.device("cpu"):
            layer = spec.build()
        modules = {
            _join(full_name, name): module
            for full_name, part in layer.parts.items()
            for name, module in part.named_modules()
        }
        partless = any(_holds_tensors(module) for module in set(layer.modules()) - set(modules.values()))
        require((not partless, f"every tensor of layer {spec.name!r} must belong to a part; name the others too"))
        for full_name, module in modules.items():
            torch.default_generator.manual_seed(derive_seed(seed, full_name))
            _fill(full_name, module, initialize)
    return layer


def _fill(full_name: str, module: nn.Module, initialize: Initialize) -> None:
    parameters = dict(module.named_parameters(recurse=False))
    if not parameters:
        return
    # what initialize leaves out must not pass for a value
    for parameter in parameters.values():
        parameter.fill_(math.nan)
    initialize(full_name, module)
    left_out = [name for name, parameter in parameters.items() if parameter.isnan().any()]
    require((not left_out, f"initialize must fill {', '.join(left_out)} of {full_name}, and did not"))


def _holds_tensors(module: nn.Module) -> bool:
    return any(True for _ in chain(module.parameters(recurse=False), module.buffers(recurse=False)))


def _misfit(name: str, own: Tensor, given: Tensor | None) -> str | None:
    if given is None:
        return f"{name} is missing"
    if (given.shape, given.dtype) != (own.shape, own.dtype):
        return f"{name} must be {own.dtype} of shape {list(own.shape)}, got {given.dtype} of shape {list(given.shape)}"
    return None


def _join(*names: str) -> str:
    return ".".join(name for name in names if name)


def _as_tuple(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
