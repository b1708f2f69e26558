"""A model as a list of layers. A pipeline may cut it between any two layers.

A stage builds only its own layers, so only their parameters take memory. Their values come from a checkpoint, or from
the seed and the full name of each module. So the cut and the order of building do not change them. Names are always
those of the unsplit model, so checkpoints and digests of any cut can be compared.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm

from thinwire.errors import ThinwireWarning
from thinwire.errors.names import first_of
from thinwire.models.digest import tensor_lines
from thinwire.models.errors import ModelError, require
from thinwire.models.large_weights import add_in_place
from thinwire.models.options import Tied
from thinwire.models.precision import NARROW, Precision, arithmetic, narrowed
from thinwire.models.recompute import Recompute, in_backward
from thinwire.models.seed import derive_seed
from thinwire.models.tensors import as_tuple, replace_tensors

T = TypeVar("T")
Initialize = Callable[[str, nn.Module], None]
ADAPTER_MARK = ".lora_"
"""What the full names of an adapter's tensors have, and no others."""


class Layer(nn.Module):
    """A piece of a model that is never cut. It takes tensors and gives a tensor or a tuple of tensors.

    A subclass sets `parts` in its constructor: the modules it holds, by their full names in the unsplit model
    ("transformer.h.3"); "" is the unsplit model itself. Every parameter and persistent buffer belongs to a part.
    """

    parts: dict[str, nn.Module]
    side: tuple[str, ...] = ()
    """Side inputs (attention_mask, ...) that the forward needs, as keyword arguments."""
    optional_side: tuple[str, ...] = ()
    """Side inputs that the forward takes as keyword arguments if the data has them; where padding does not cross,
    `lengths` is one: the tokens of each sample before it, int64 [B]."""

    def remember(self, remembers: bool) -> None:
        """Keep of all tokens from now on what later ones need, so that these come alone; or forget it.

        A layer of `Blueprint.remembers` does; any other needs all tokens each time.
        """

    def hold(self, model: "Blueprint") -> None:
        """Keep the weights, or those that do not train, in the model's dtype from now on.

        Batch norms stay as they are: their running statistics move by less than 16 bits can show. So do buffers that no
        checkpoint holds, such as rotary frequencies.
        """
        norms = [module for part in self.parts.values() for module in part.modules() if isinstance(module, _BatchNorm)]
        as_they_are = {id(tensor) for norm in norms for tensor in norm.state_dict(keep_vars=True).values()}
        for name, tensor in self.full_state(keep_vars=True).items():
            trains = bool(model.trained) and tensor.requires_grad
            if tensor.is_floating_point() and not (trains or name in model.wide or id(tensor) in as_they_are):
                tensor.data = tensor.data.to(model.weights_dtype)  # one by one: the wide one is freed before the next

    def full_state(self, *, keep_vars: bool = False) -> dict[str, Tensor]:
        """The parameters and persistent buffers by full name; they share memory with the layer.

        They are the layer's own with `keep_vars`, and else detached from autograd.
        """
        return self._by_full_name(lambda part: part.state_dict(keep_vars=keep_vars).items())

    def full_parameters(self) -> dict[str, Parameter]:
        """The parameters by full name."""
        return self._by_full_name(lambda part: part.named_parameters())

    def full_modules(self) -> dict[str, nn.Module]:
        """The parts and every module below them, by full name, parents before children."""
        return self._by_full_name(lambda part: part.named_modules())

    def _by_full_name(self, named: Callable[[nn.Module], Iterable[tuple[str, T]]]) -> dict[str, T]:
        """What is `named` in each part, by full name."""
        return {_full_name(part, name): each for part, module in self.parts.items() for name, each in named(module)}


class Chain(Layer):
    """Runs its parts in order; the result of one, a tensor or a tuple, is the next one's arguments."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.parts = dict(parts)
        # the names of parts have dots, which those of submodules may not
        self.sequence = nn.ModuleList(parts.values())

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The result of the last part."""
        result: Tensor | tuple[Tensor, ...] = tensors
        for module in self.sequence:
            result = module(*as_tuple(result))
        return result


class Weights(Protocol):
    """The values of a whole model; a stage takes only its own. Unless a class says otherwise, they are all there."""

    def lacking(self, names: Sequence[str]) -> list[str]:
        """The full names among these that have no value here, and that the seed may give.

        Raises:
            ModelError: a value is missing that the seed may not give.
        """
        return []

    def unread(self, names: Sequence[str]) -> list[str]:
        """The stored tensors that a model with these full names does not read.

        Raises:
            ModelError: without them the others are wrong, as without the scales of quantized weights.
        """
        return []

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Compare the shapes of these tensors, by full name, with the stored ones, if that needs no download.

        Raises:
            ModelError: a tensor has another shape; the message names all such tensors.
        """
        return

    def digest(self) -> str:
        """A hash by which processes see that they read the same files; empty where they need not."""
        return ""

    def wide(self, dtype: str) -> list[str]:
        """The full names of what is float32 here beside values of a narrower dtype, as far as that needs no download.

        `dtype` is a name of torch's.
        """
        return []

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy values into these tensors, by full name.

        Raises:
            ModelError: a tensor has another shape. The message names all such tensors; nothing is copied.
        """


@dataclass(frozen=True)
class LayerSpec:
    """How to build a layer, and what is known before it is built."""

    name: str
    """What people call the layer: "block 3"."""
    build: Callable[[], Layer]
    """Makes the layer on the CPU. The caller puts parameters on the meta device as they are made, and keeps buffers."""
    cost: float = 1.0
    """The layer's share of the compute, in any unit that is the same for all layers."""


@dataclass(frozen=True)
class Blueprint:
    """A model that is not built yet."""

    layers: tuple[LayerSpec, ...]
    """The layers, first to last: the outputs of one are the inputs of the next."""
    initialize: Initialize
    """Fills the tensors that a module itself holds, given its full name. It draws from torch's default CPU generator
    only. It is called for each module of each part, children first, so a parent may fill its children again."""
    checkpoint: Weights | None = None
    """The source of the values; None means the seed."""
    side: tuple[str, ...] = ()
    """All side inputs that the layers read, needed or optional."""
    shared: tuple[str, ...] = ()
    """Full names of parts that several layers may hold. Copies on several stages start with the same values, and stay
    the same only if their gradients are summed."""
    vocab_size: int | None = None
    """The number of token ids that the model can read; None if it reads no tokens."""
    padding: int | None = None
    """The token by which a classifier finds where a text ends; None where it needs none."""
    max_positions: int | None = None
    """The longest sequence of tokens that the model can read; None if there is no limit."""
    switch: int | None = None
    """The longest sequence of tokens that the model computes in another way than longer ones; None without such."""
    counted: bool = True
    """Whether the costs of the layers are operations. If false they are parameters, because the shapes of the inputs
    were not known."""
    save_config: Callable[[Path], None] | None = None
    """Writes into a folder all that the library needs, beside the weights, to load the unsplit model; None if nothing
    is needed."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Weights of the head that the library's own model shares with another tensor: {"lm_head.weight":
    "transformer.wte.weight"}. Here the two are separate tensors."""
    head: Tied | None = None
    """Whether the head and the embedding, which are one weight in the library's model, stay one here; None where they
    are two there."""
    inside: str = ""
    """The type of the library's model of text and images whose text model this is; empty for others."""
    compare: Callable[[], str] | None = None
    """Compares a tiny copy of the model, cut, with the uncut one, and says in a sentence what it found. ModelError if
    they differ. None where the layers are the model itself."""
    remembers: Callable[[], bool] | None = None
    """Says whether layers that `remember` compute, token by token, what they compute of all tokens at once. None where
    no layer remembers anything."""
    ends: Callable[[], tuple[int, ...]] = tuple
    """Reads which tokens end a text."""
    more_ends: tuple[int, ...] = ()
    """What ends a text beside those: tokens by which answers end in the data."""
    unheeded: Callable[[], Sequence[str]] = tuple
    """Reads which settings, by name, let the library write another text than the most likely tokens."""
    dtype: str = "float32"
    """The dtype of the weights in the original model."""
    weights_dtype: torch.dtype = torch.float32
    """The dtype of the weights while the model trains; batch norms stay float32, and so does what trains beside a
    frozen model."""
    wide: AbstractSet[str] = frozenset()
    """The full names of tensors that stay float32 beside narrower ones, as the library has them: routers."""
    narrow: Callable[[int, Layer], None] = lambda index, layer: None
    """Makes of the frozen weights of a layer, by its index, what takes less memory: 4 bits."""
    trained: tuple[str, ...] = ()
    """The full names of what trains beside a frozen model; empty where the model itself trains. Then checkpoints hold
    these alone."""

    @cached_property
    def on_meta(self) -> list[Layer]:
        """All layers, to look at, their weights on the meta device."""
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            return [_build_layer(spec) for spec in self.layers]


class Stage(Layer):
    """Consecutive layers as one, computed in one precision.

    Attributes:
        base: the frozen weights beside an adapter, which checkpoints do not hold: a line for each full name, as those
            of a digest. Empty without an adapter.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        precision: Precision = "fp32",
        shared: Sequence[str] = (),
        recompute: Recompute = "none",
        *,
        reads: bool = True,
        crosses: bool = False,
    ) -> None:
        """Join the layers.

        Parts with a name in `shared` become one module: that of the first layer that holds it. `reads` says whether the
        inputs are samples, and `crosses` whether the outputs go to another stage. Outputs that cross have the type of
        the arithmetic.
        """
        super().__init__()
        names = [full_name for layer in layers for full_name in layer.parts]
        twice = sorted({name for name in names if names.count(name) > 1} - set(shared))
        require((not twice, f"each part must have a name of its own, got {', '.join(twice)} more than once"))
        _share_parts(layers)
        self.layers = nn.ModuleList(layers)
        self.parts = {name: part for layer in layers for name, part in layer.parts.items()}
        add_in_place(self.layers)
        self.precision, self.recompute, self.reads, self.crosses = precision, recompute, reads, crosses
        self.weights_dtype = torch.float32
        self.base: dict[str, str] = {}

    def forward(self, *tensors: Tensor, **side: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the layers in order. The outputs of a layer are the arguments of the next.

        Each layer gets the side inputs that it names; others are ignored.
        """
        # pixels are float32, whatever the weights are; a stage before may hand on float32 on purpose, as Mamba's sum
        result: Tensor | tuple[Tensor, ...] = narrowed(tensors, self.weights_dtype) if self.reads else tensors
        with arithmetic(self.precision, tensors[0].device.type):
            for layer in self._own():
                given, own = as_tuple(result), _side_of(layer, side)
                result = layer(*given, **own) if self.recompute == "none" else in_backward(layer, given, own)
        if not self.crosses:
            return result
        # autocast leaves some results float32, such as the sum of an embedding and a product
        sent = narrowed(as_tuple(result), NARROW.get(self.precision, torch.float32))
        return sent if isinstance(result, tuple) else sent[0]

    def _own(self) -> Iterator[Layer]:
        return (layer for layer in self.layers if isinstance(layer, Layer))

    def remember(self, remembers: bool) -> None:
        """Let all layers keep of the tokens from now on what later ones need, or forget it."""
        for layer in self._own():
            layer.remember(remembers)

    def saved_state(self) -> dict[str, Tensor]:
        """What a checkpoint holds of `full_state`: all, or what trains beside a frozen model."""
        return {name: tensor for name, tensor in self.full_state().items() if name not in self.base}


def build_stage(
    blueprint: Blueprint,
    layers: range,
    *,
    seed: int,
    precision: Precision = "fp32",
    recompute: Recompute = "none",
    device: torch.device | str = "cpu",
) -> Stage:
    """Build some layers of the model. Values come from the checkpoint, or from the seed and the full names.

    Tensors that the checkpoint lacks are drawn too, and a warning names them. All values are filled in on the CPU, for
    any `device`. The state of torch's generators does not change.

    Raises:
        ModelError: the blueprint leaves a module without a name or a value, or the checkpoint does not fit the model.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        built = [_build_layer(blueprint.layers[index]) for index in layers]
        ends = {"reads": layers.start == 0, "crosses": layers.stop < len(blueprint.layers)}
        stage = Stage(built, precision, blueprint.shared, recompute, **ends)
        # takes no memory before there are values
        replace_tensors(stage, lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor)
        stage.weights_dtype = blueprint.weights_dtype
        lacking: list[str] = []
        filled: set[str] = set()
        # one at a time: the wide values of a layer are freed before those of the next come
        for index, layer in zip(layers, built, strict=True):
            lacking += _fill(layer, blueprint, seed, filled)
            filled |= layer.full_state().keys()
            if blueprint.trained:
                frozen = {name: tensor for name, tensor in layer.full_state().items() if name not in blueprint.trained}
                stage.base |= dict(zip(frozen, tensor_lines(frozen), strict=True))
            blueprint.narrow(index, layer)
    if told := [name for name in lacking if ADAPTER_MARK not in name]:
        warnings.warn(
            f"the checkpoint has no {', '.join(told)}; the seed gives their values", ThinwireWarning, stacklevel=2
        )
    # as training has it: what a factory puts into evaluation mode would train from the first step on, unforeseen
    return stage.to(device).train()


def check_weights(blueprint: Blueprint) -> list[str]:
    """Check that the checkpoint, if there is one, fits the whole model. No values are read.

    Returns the names of stored tensors that the model does not have.

    Raises:
        ModelError: weights are missing, have another shape or are quantized; the message names them.
    """
    if blueprint.checkpoint is None:
        return []
    state = {name: tensor for layer in blueprint.on_meta for name, tensor in layer.full_state().items()}
    lacking = set(blueprint.checkpoint.lacking(list(state)))
    unread = blueprint.checkpoint.unread(list(state))
    blueprint.checkpoint.check({name: tensor for name, tensor in state.items() if name not in lacking})
    return unread


def stage_output_examples(
    blueprint: Blueprint,
    cuts: Sequence[range],
    example_input: Tensor,
    precision: Precision,
    side: Mapping[str, Tensor] | None = None,
    around: Callable[[int], AbstractContextManager[Any]] = nullcontext,
) -> list[tuple[Tensor, ...]]:
    """The outputs of each stage as meta tensors: shape, dtype, and requires_grad if gradients flow.

    Nothing is computed: the layers run on tensors without data. `example_input` is one micro-batch of the model's
    input, and `side` its side inputs. Only their shape, dtype and device are read; a meta tensor means the CPU. Each
    stage runs inside the context `around(index of the stage)`.
    """
    device = torch.device("cpu") if example_input.is_meta else example_input.device

    def without_data(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    described = []
    with torch.random.fork_rng(devices=[]):
        stages = [
            Stage(
                [_build_layer(blueprint.layers[index]) for index in cut],
                precision,
                blueprint.shared,
                reads=cut.start == 0,
                crosses=cut.stop < len(blueprint.layers),
            )
            for cut in cuts
        ]
    # TorchScript, as in DeBERTa up to transformers 5.22, makes real tensors of its constants
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        tensors: tuple[Tensor, ...] = (without_data(example_input),)
        known_side = {name: without_data(tensor) for name, tensor in (side or {}).items()}
        for index, stage in enumerate(stages):
            replace_tensors(stage, without_data)
            stage.weights_dtype = blueprint.weights_dtype
            stage.hold(blueprint)
            with around(index), _held_still(stage):
                tensors = as_tuple(stage(*tensors, **known_side))
            described.append([(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors])
    return [
        tuple(
            torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)
            for shape, dtype, requires_grad in output
        )
        for output in described
    ]


@contextmanager
def _held_still(stage: Stage) -> Iterator[None]:
    """Raise ModelError if a buffer that no checkpoint holds moves in this context, but for rotary frequencies."""

    def found() -> dict[tuple[nn.Module, str], tuple[Tensor, int]]:
        own = {(part, name): part._buffers.get(name) for part in stage.modules() for name in _unsaved(part)}
        return {place: (each, each._version) for place, each in own.items() if each is not None}

    before = found()
    yield
    after = found()
    moved = sorted(f"{type(m).__name__}.{name}" for m, name in before if _differ(before[m, name], after.get((m, name))))
    if moved:
        raise ModelError(
            f"a buffer that changes in the forward must be in checkpoints, or a resume and an evaluation begin without "
            f"its values, got {first_of(moved)}; register it with persistent=True"
        )


def _differ(one: tuple[Tensor, int], other: tuple[Tensor, int] | None) -> bool:
    return other is None or other[0] is not one[0] or other[1] != one[1]


def _unsaved(module: nn.Module) -> list[str]:
    return [name for name in module._non_persistent_buffers_set if not name.endswith("inv_freq")]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put the parameters of modules made in this context on the meta device, and leave their buffers real.

    Constructors then draw no random numbers and use no memory for weights. Buffers, such as rotary frequencies, keep
    their values, which the meta device would lose.
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
    named = {id(tensor) for tensor in layer.full_state(keep_vars=True).values()}
    partless = any(id(tensor) not in named for tensor in layer.state_dict(keep_vars=True).values())
    require((not partless, f"every tensor of layer {spec.name!r} must belong to a part; name the others too"))
    return layer


def _fill(layer: Layer, blueprint: Blueprint, seed: int, filled: AbstractSet[str]) -> list[str]:
    """Give a layer its values, but for shared ones that are `filled`; the names that a checkpoint lacks."""
    names, checkpoint = [name for name in layer.full_state() if name not in filled], blueprint.checkpoint
    lacking = names if checkpoint is None else checkpoint.lacking(names)
    _draw(layer.full_modules(), set(lacking), blueprint.initialize, seed)
    # after the draw, whose numbers are those of float32; before the files are read into weights as narrow as these
    layer.hold(blueprint)
    if checkpoint is None:
        return []
    state = {name: tensor for name, tensor in layer.full_state().items() if name not in filled}
    checkpoint.fill({name: tensor for name, tensor in state.items() if name not in lacking})
    _require_numbers(state, layer.full_parameters())
    return lacking


def _require_numbers(state: Mapping[str, Tensor], parameters: Mapping[str, Parameter]) -> None:
    """Raise ModelError if a value is NaN, or one of a parameter infinite: a mask may be."""
    totals = {name: tensor.sum() for name, tensor in state.items() if tensor.is_floating_point()}
    bad = [name for name, total in totals.items() if total.isnan() or (name in parameters and total.isinf())]
    if bad:
        raise ModelError(
            f"the weights to start with must be numbers, got NaN or infinity in {first_of(bad, 3)}; take other "
            f"files; if they are of a run, it diverged: train again with a lower learning rate"
        )


def _draw(modules: Mapping[str, nn.Module], lacking: set[str], initialize: Initialize, seed: int) -> None:
    """Initialize the modules that hold a missing tensor, or have a child that does."""
    affected = {
        full_name: module
        for full_name, module in modules.items()
        if any(_full_name(full_name, name) in lacking for name in module.state_dict())
    }
    # NaN shows which parameters `initialize` does not fill
    for module in affected.values():
        for parameter in module.parameters(recurse=False):
            parameter.fill_(math.nan)
    # parents come before their children in `modules`
    for full_name, module in reversed(affected.items()):
        torch.default_generator.manual_seed(derive_seed(seed, full_name))
        initialize(full_name, module)
    for full_name, module in affected.items():
        left_out = [name for name, tensor in module.named_parameters(recurse=False) if tensor.isnan().any()]
        require((not left_out, f"initialize must fill all of {full_name}, but left out {', '.join(left_out)}"))


def _share_parts(layers: Sequence[Layer]) -> None:
    """Make parts of the same name one module: that of the first layer that holds it."""
    first: dict[str, nn.Module] = {}
    for layer in layers:
        for name, part in layer.parts.items():
            kept = first.setdefault(name, part)
            if kept is not part:
                exchange(layer, part, kept)
                layer.parts[name] = kept


def replace_module(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place of another one, wherever modules below `root` hold that."""
    places = [(parent, name) for parent in root.modules() for name, child in parent.named_children() if child is old]
    for parent, name in places:
        setattr(parent, name, new)


def exchange(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """As `replace_module`, with a module of as many parameters, which take the places of the old ones too."""
    replace_module(root, old, new)
    # parameters of the old one that other modules hold too, such as a tied head
    same = {id(before): after for before, after in zip(old.parameters(), new.parameters(), strict=True)}
    for module in root.modules():
        module._parameters.update({name: same[id(p)] for name, p in module._parameters.items() if id(p) in same})


def _side_of(layer: Layer, side: Mapping[str, Tensor]) -> dict[str, Tensor]:
    missing = [name for name in layer.side if name not in side]
    require((not missing, f"the model needs the side inputs {', '.join(missing)}, got {', '.join(side) or 'none'}"))
    return {name: side[name] for name in (*layer.side, *layer.optional_side) if name in side}


def _full_name(part: str, name: str) -> str:
    return f"{part}.{name}" if part and name else part or name
