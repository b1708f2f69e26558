"""A model as a list of layers that a pipeline may cut anywhere between: the shape every model here takes.

A stage builds only its own layers, and only their parameters take memory. Their values come from a checkpoint, or from
the seed and each module's full name alone, so neither the cut nor the order of building can matter. Names are those of
the unsplit model everywhere, so that checkpoints and digests of any cut can be compared.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

from thinwire.models.errors import require
from thinwire.models.seed import derive_seed

Precision = Literal["fp32", "bf16"]
Initialize = Callable[[str, nn.Module], None]


class Layer(nn.Module):
    """One piece of a model that is never cut: tensors in, a tensor or a tuple of tensors out.

    A subclass sets `parts` in its constructor: the full name in the unsplit model ("transformer.h.3") of each module it
    holds, "" for the unsplit model itself. Every parameter and persistent buffer belongs to a part.
    """

    parts: dict[str, nn.Module]
    side: tuple[str, ...] = ()
    """The side inputs (attention_mask, ...) that its forward takes by keyword, and cannot do without."""
    optional_side: tuple[str, ...] = ()
    """The side inputs that its forward takes by keyword where the data has them."""

    def full_state(self) -> dict[str, Tensor]:
        """The parameters and persistent buffers by full name; they share memory with the layer."""
        return {
            _full_name(part_name, name): tensor
            for part_name, part in self.parts.items()
            for name, tensor in part.state_dict().items()
        }

    def full_parameters(self) -> dict[str, Parameter]:
        """The parameters by full name."""
        return {
            _full_name(part_name, name): parameter
            for part_name, part in self.parts.items()
            for name, parameter in part.named_parameters()
        }

    def full_modules(self) -> dict[str, nn.Module]:
        """The parts and every module below them, by full name, parents before children."""
        return {
            _full_name(part_name, name): module
            for part_name, part in self.parts.items()
            for name, module in part.named_modules()
        }


@dataclass(frozen=True)
class LayerSpec:
    """A layer that may be built, and what is known of it before it is."""

    name: str
    """What people call the layer: "block 3"."""
    build: Callable[[], Layer]
    """Makes the layer on the CPU; its parameters are put on the meta device as they are made, its buffers are kept."""
    cost: float = 1.0
    """The layer's share of the compute, in any unit common to the model."""


class Weights(Protocol):
    """Values of a whole model, of which a stage takes its own."""

    def lacking(self, names: Sequence[str]) -> list[str]:
        """Which of these tensors, by full name, have no value here and are to be drawn from the seed.

        Raises:
            ModelError: if one is lacking that nobody can mean to draw.
        """

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Compare shapes, as far as that needs no download, with those of these tensors, by full name.

        Raises:
            ModelError: with every tensor of another shape.
        """

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy values into these tensors, by full name.

        Raises:
            ModelError: with every tensor of another shape; nothing is copied then.
        """


@dataclass(frozen=True)
class Blueprint:
    """A model that nobody has built yet."""

    layers: tuple[LayerSpec, ...]
    """The layers, first to last: the outputs of one are the inputs of the next."""
    initialize: Initialize
    """Fills what a module itself holds, given the module's full name; draws from torch's default CPU generator only.
    Called for each module of each part, children first, so that a parent may refill what its children hold."""
    checkpoint: Weights | None = None
    """Where the values come from; the seed, if None."""
    side: tuple[str, ...] = ()
    """The side inputs that the layers read: every one of them, needed or optional."""
    shared: tuple[str, ...] = ()
    """The full names of parts that more than one layer may hold; copies on several stages start with the same values,
    and stay the same only if their gradients are summed."""
    vocab_size: int | None = None
    """The number of token ids that the model can read, if it reads tokens."""
    max_positions: int | None = None
    """The longest sequence of tokens that the model can read, if there is a limit."""
    counted: bool = True
    """Whether the layers' costs are operations; else they are parameters, for nobody knew what the layers read."""
    save_config: Callable[[Path], None] | None = None
    """Writes into a folder what the library needs, beside the weights, to load the unsplit model; None if nothing."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """The weights of the head that the library's own model shares, and whose they are there; here they are apart."""
    dtype: str = "float32"
    """The type of the weights as the model came; training keeps them in float32."""

    def __post_init__(self) -> None:
        require((len(self.layers) > 0, "a model must have at least one layer, got none"))


class Stage(nn.Module):
    """Consecutive layers as one module, computed in one precision."""

    def __init__(self, layers: Sequence[Layer], precision: Precision = "fp32", shared: Sequence[str] = ()) -> None:
        """Take layers; parts of a name in `shared` become one module, that of the first layer that holds it."""
        super().__init__()
        known = get_args(Precision)
        names = [full_name for layer in layers for full_name in layer.parts]
        twice = sorted({name for name in names if names.count(name) > 1} - set(shared))
        require(
            (precision in known, f"precision must be one of {', '.join(known)}, got {precision!r}"),
            (not twice, f"no two parts may share a name, got {', '.join(twice)} more than once"),
        )
        _share_parts(layers)
        self.layers = nn.ModuleList(layers)
        self.precision = precision
        self.shared = tuple(name for name in shared if name in names)
        self.side = tuple(dict.fromkeys(name for layer in layers for name in (*layer.side, *layer.optional_side)))

    def forward(self, *tensors: Tensor, **side: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the layers in order; a layer's outputs, one or many, are the next layer's arguments.

        Each layer is given the side inputs it names; there may be more than any layer names.
        """
        result: Tensor | tuple[Tensor, ...] = tensors
        with self._arithmetic(tensors[0].device.type):
            for layer in self.layers:
                assert isinstance(layer, Layer)
                result = layer(*_as_tuple(result), **_side_of(layer, side))
        return result

    def _arithmetic(self, device_type: str) -> AbstractContextManager[Any]:
        return torch.autocast(device_type, dtype=torch.bfloat16) if self.precision == "bf16" else nullcontext()

    def full_state(self) -> dict[str, Tensor]:
        """The parameters and persistent buffers by full name; they share memory with the stage."""
        state: dict[str, Tensor] = {}
        for layer in self.layers:
            assert isinstance(layer, Layer)
            state |= layer.full_state()
        return state

    def full_parameters(self) -> dict[str, Parameter]:
        """The parameters by full name."""
        found: dict[str, Parameter] = {}
        for layer in self.layers:
            assert isinstance(layer, Layer)
            found |= layer.full_parameters()
        return found


def build_stage(
    blueprint: Blueprint,
    layers: range,
    *,
    seed: int,
    precision: Precision = "fp32",
    device: torch.device | str = "cpu",
) -> Stage:
    """Build some of the model's layers, with the values of the checkpoint, or drawn from the seed and the full names.

    What the checkpoint lacks is drawn too, and a warning names it. The values are filled in on the CPU, whatever
    `device` the stage ends on, and torch's generators are left as they were.

    Raises:
        ModelError: if there are no such layers, the blueprint names or fills its modules incompletely, or the
            checkpoint does not fit the model.
    """
    count = len(blueprint.layers)
    require(
        (len(layers) > 0, f"a stage must have at least one layer, got {layers}"),
        (set(layers) <= set(range(count)), f"layers must lie in 0..{count - 1}, got {layers}"),
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        built = [_build_layer(blueprint.layers[index]) for index in layers]
        stage = Stage(built, precision, blueprint.shared)
        _replace_tensors(stage, lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor)
        _fill(stage, blueprint, seed)
    return stage.to(device)


def check_weights(blueprint: Blueprint) -> None:
    """Check that the checkpoint, if there is one, fits the whole model, before anybody reads its values.

    Raises:
        ModelError: with every weight that is lacking, or else has another shape.
    """
    if blueprint.checkpoint is None:
        return
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        layers = [_build_layer(spec) for spec in blueprint.layers]
    state = {name: tensor for layer in layers for name, tensor in layer.full_state().items()}
    lacking = set(blueprint.checkpoint.lacking(list(state)))
    blueprint.checkpoint.check({name: tensor for name, tensor in state.items() if name not in lacking})


def stage_output_examples(
    blueprint: Blueprint,
    cuts: Sequence[range],
    example_input: Tensor,
    precision: Precision,
    side: Mapping[str, Tensor] | None = None,
    around: Callable[[int], AbstractContextManager[Any]] = nullcontext,
) -> list[tuple[Tensor, ...]]:
    """Each stage's output as meta tensors: shape, dtype, and requires_grad where gradients flow.

    Nothing is computed: the layers run on tensors without data. `example_input` is one micro-batch of the model's
    input and `side` its side inputs, of which only shape, dtype and device are read (a meta tensor stands for one on
    the CPU). Each stage runs inside of `around(its index)`.
    """
    device = torch.device("cpu") if example_input.is_meta else example_input.device

    def without_data(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    described = []
    with torch.random.fork_rng(devices=[]):
        stages = [
            Stage([_build_layer(blueprint.layers[index]) for index in cut], precision, blueprint.shared) for cut in cuts
        ]
    # TorchScript, as in DeBERTa up to transformers 5.22, makes real tensors of its constants
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        tensors: tuple[Tensor, ...] = (without_data(example_input),)
        known_side = {name: without_data(tensor) for name, tensor in (side or {}).items()}
        for index, stage in enumerate(stages):
            _replace_tensors(stage, without_data)
            with around(index):
                tensors = _as_tuple(stage(*tensors, **known_side))
            described.append([(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors])
    return [
        tuple(
            torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)
            for shape, dtype, requires_grad in output
        )
        for output in described
    ]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put the parameters of modules made in this context on the meta device, and leave their buffers real.

    Constructors then neither draw random numbers nor touch the memory of weights, while what they compute for good,
    such as rotary frequencies, keeps its values: on the meta device these would be lost.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _build_layer(spec: LayerSpec) -> Layer:
    with parameters_on_meta():
        layer = spec.build()
    named = {id(tensor) for part in layer.parts.values() for tensor in part.state_dict(keep_vars=True).values()}
    partless = any(id(tensor) not in named for tensor in layer.state_dict(keep_vars=True).values())
    require((not partless, f"every tensor of layer {spec.name!r} must belong to a part; name the others too"))
    return layer


def _replace_tensors(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer by what `make` returns for it; what was one tensor stays one tensor."""
    made: dict[int, Tensor] = {}

    def replacement(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            new = make(tensor)
            keep = new is tensor or not isinstance(tensor, nn.Parameter)
            made[id(tensor)] = new if keep else nn.Parameter(new, tensor.requires_grad)
        return made[id(tensor)]

    # kept alive, so that no id is used twice
    old = [tensor for part in module.modules() for store in _stores(part) for tensor in store.values()]
    for part in module.modules():
        for store in _stores(part):
            store.update({name: replacement(tensor) for name, tensor in store.items() if tensor is not None})
    del old


def _stores(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


def _fill(stage: Stage, blueprint: Blueprint, seed: int) -> None:
    state, checkpoint = stage.full_state(), blueprint.checkpoint
    lacking = list(state) if checkpoint is None else checkpoint.lacking(list(state))
    modules: dict[str, nn.Module] = {}
    for layer in stage.layers:
        assert isinstance(layer, Layer)
        modules |= layer.full_modules()
    _draw(modules, set(lacking), blueprint.initialize, seed)
    if checkpoint is None:
        return
    checkpoint.fill({name: tensor for name, tensor in state.items() if name not in lacking})
    if lacking:
        warnings.warn(f"the checkpoint has no {', '.join(lacking)}: drawn from the seed", stacklevel=3)


def _draw(modules: Mapping[str, nn.Module], lacking: set[str], initialize: Initialize, seed: int) -> None:
    """Initialize the modules that hold a lacking tensor, or have a child that does."""
    affected = {
        full_name: module
        for full_name, module in modules.items()
        if any(_full_name(full_name, name) in lacking for name in module.state_dict())
    }
    # what initialize leaves out must not pass for a value
    for module in affected.values():
        for parameter in module.parameters(recurse=False):
            parameter.fill_(math.nan)
    # parents come before their children in `modules`
    for full_name, module in reversed(affected.items()):
        torch.default_generator.manual_seed(derive_seed(seed, full_name))
        initialize(full_name, module)
    for full_name, module in affected.items():
        left_out = [name for name, tensor in module.named_parameters(recurse=False) if tensor.isnan().any()]
        require((not left_out, f"initialize must fill {', '.join(left_out)} of {full_name}, and did not"))


def _share_parts(layers: Sequence[Layer]) -> None:
    """Make parts of one name one module: that of the first layer that holds it."""
    first: dict[str, nn.Module] = {}
    for layer in layers:
        for name, part in layer.parts.items():
            kept = first.setdefault(name, part)
            if kept is not part:
                _exchange(layer, part, kept)
                layer.parts[name] = kept


def _exchange(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    places = [(parent, name) for parent in root.modules() for name, child in parent.named_children() if child is old]
    for parent, name in places:
        setattr(parent, name, new)


def _side_of(layer: Layer, side: Mapping[str, Tensor]) -> dict[str, Tensor]:
    missing = [name for name in layer.side if name not in side]
    require((not missing, f"the model needs the side inputs {', '.join(missing)}, got {', '.join(side) or 'none'}"))
    return {name: side[name] for name in (*layer.side, *layer.optional_side) if name in side}


def _full_name(part: str, name: str) -> str:
    return f"{part}.{name}" if part and name else part or name


def _as_tuple(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
