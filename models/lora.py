"""LoRA in PEFT's format: a pair of small matrices beside each chosen linear module. They train; the model is frozen.

The names are those that PEFT gives the unsplit model. Beside `model.layers.3.mlp.up_proj.base_layer.weight`, which is
the model's own weight, stand `model.layers.3.mlp.up_proj.lora_A.default.weight` and `lora_B`. In PEFT's files they have
the prefix `base_model.model.` and no `default`. Heads that a pretrained model may lack, as those of classifiers, train
in full, under their own names. Frozen weights beside it may have 4 bits: NF4 of QLoRA, by the library bitsandbytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors.names import first_of
from thinwire.models.checkpoint import WEIGHTS, Checkpoint, Stored, read_headers
from thinwire.models.errors import ModelError, require
from thinwire.models.layers import (
    ADAPTER_MARK,
    Blueprint,
    Initialize,
    Layer,
    LayerSpec,
    Stage,
    replace_module,
)
from thinwire.models.options import ALL_LINEAR, FRESH, LoraOptions

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PLAIN: Mapping[str, Sequence[Any]] = {
    "use_dora": [False],
    "use_rslora": [False],
    "use_qalora": [False],
    "use_bdlora": [None],
    "kasa_config": [None],
    "alora_invocation_tokens": [None],
    "lora_bias": [False],
    "layer_replication": [None],
    "target_parameters": [None],
    "trainable_token_indices": [None],
    "bias": ["none"],
    "rank_pattern": [{}],
    "alpha_pattern": [{}],
    "init_lora_weights": [True, "gaussian", "eva", "orthogonal"],
}
"""Fields of an adapter's configuration, and the values that leave its matrices what they are and the model as it was.

False and null are as the first. Other ways to begin, as pissa, take out of the model what they put into the matrices.
"""

_MATRICES = (".lora_A.default.weight", ".lora_B.default.weight")
_OF_MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Models in which PEFT refuses an `out_proj`: kernels read its weight past the matrices beside it."""
_READ_PAST = ".dt_proj"
"""The end of the names of modules whose weights the library's own forwards read so: of mamba, jamba and their kin."""


@dataclass(frozen=True, kw_only=True)
class AdaptedWeights:
    """The values of a model with an adapter, by its full names."""

    base: Checkpoint
    """The model without the adapter."""
    heads: frozenset[str]
    """Weights of the model that train in full."""
    adapter: Checkpoint | None
    """What trained before; None means that the seed gives the adapter."""

    def lacking(self, names: Sequence[str]) -> list[str]:
        """As that of `Weights`: without an adapter to start from, the seed gives it."""
        frozen, own = self._divide(names)
        self._require_targets(own)
        lost = set(self.base.lacking([*frozen.values()]))
        drawn = [name for name, stored in frozen.items() if stored in lost]
        return drawn + (own if self.adapter is None else self.adapter.lacking(own))

    def _require_targets(self, own: Sequence[str]) -> None:
        """Raise ModelError if the adapter lacks matrices that the recipe wants."""
        if self.adapter is None:
            return
        stored = {name for name in self.adapter.stored if is_adapter(name)}
        if lacks := sorted({name for name in own if is_adapter(name)} - stored):
            ends = sorted({name.partition(ADAPTER_MARK)[0].rpartition(".")[2] for name in stored})
            raise ModelError(
                f"model.lora.targets must be those of the adapter in {self.adapter.source}, which lacks "
                f"{first_of(lacks)}; set them to [{', '.join(ends)}]"
            )

    def unread(self, names: Sequence[str]) -> list[str]:
        """As that of `Weights`. ModelError if the adapter has tensors that the model does not: other targets."""
        frozen, own = self._divide(names)
        more = [] if self.adapter is None else self.adapter.unread(own)
        source = "" if self.adapter is None else self.adapter.source
        others = [name for name in more if not name.endswith(_MATRICES)]
        require(
            (
                not others,
                f"an adapter to start from must hold no weights but its matrices, and {source} has "
                f"{first_of(others)}; merge it into its model with merge_and_unload of PEFT, and name the result as "
                f"model.name",
            ),
            (
                not more or bool(others),
                f"the adapter of {source} must have the targets of model.lora.targets, and has {first_of(more)}; name "
                "the targets it was trained with",
            ),
        )
        return self.base.unread([*frozen.values(), *self.heads])

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """As that of `Weights`."""
        for source, wanted in self._by_source(tensors):
            source.check(wanted)

    def digest(self) -> str:
        """As that of `Weights`."""
        return self.base.digest() + ("" if self.adapter is None else self.adapter.digest())

    def wide(self, dtype: str) -> list[str]:
        """As that of `Weights`."""
        return self.base.wide(dtype)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """As that of `Weights`."""
        for source, wanted in self._by_source(tensors):
            source.fill(wanted)

    def _by_source(self, tensors: Mapping[str, Tensor]) -> list[tuple[Checkpoint, dict[str, Tensor]]]:
        frozen, own = self._divide([*tensors])
        of_base = {stored: tensors[name] for name, stored in frozen.items()}
        if self.adapter is None:
            return [(self.base, of_base)]
        return [(self.base, of_base), (self.adapter, {name: tensors[name] for name in own})]

    def _divide(self, names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
        """Names with what the model calls them without the adapter; and the names that the adapter's files have."""
        in_adapter = [name for name in names if is_adapter(name) or (self.adapter is not None and name in self.heads)]
        own = set(in_adapter)
        return {name: without_adapter(name) for name in names if name not in own}, in_adapter


def with_lora(model: Blueprint, options: LoraOptions, base: str, task_type: str, model_type: str) -> Blueprint:
    """The same model, frozen, with a new or a given adapter.

    The model is one of transformers, with pretrained weights. `base` is the folder or the name on the hub that PEFT
    shall take the model from, `task_type` PEFT's name of the task, `model_type` the library's of the kind of model.

    Raises:
        ModelError: the targets are nowhere in the model, or the given adapter is another one.
    """
    assert isinstance(model.checkpoint, Checkpoint)
    layers = model.on_meta
    modules = {name: module for layer in layers for name, module in layer.full_modules().items()}
    heads = frozenset(
        name for layer in layers for name in layer.full_state() if name.startswith(model.checkpoint.fresh or ("\0",))
    )
    [*_, head] = [name for name, module in layers[-1].full_modules().items() if is_linear(module)] or [""]
    linear = {name for name, module in modules.items() if is_linear(module) and f"{name}.weight" not in heads}
    targets = _targets(options, modules, _known_to_peft(linear, model_type), head, model_type)
    fields: dict[str, Any] = {
        "r": options.rank,
        "lora_alpha": options.scale,
        "lora_dropout": options.dropout,
        "fan_in_fan_out": not any(isinstance(modules[name], nn.Linear) for name in targets),
        "task_type": task_type,
        "base_model_name_or_path": base,
        # whole parts: PEFT adds `classifier` by itself, and would wrap what is named inside it twice
        "modules_to_save": sorted(part.removesuffix(".") for part in model.checkpoint.fresh) or None,
    }
    adapter = None if options.weights == FRESH else _open(options)
    return replace(
        model,
        layers=tuple(replace(spec, build=partial(_adapted, spec, fields, targets, heads)) for spec in model.layers),
        initialize=partial(_initialize, model.initialize),
        checkpoint=AdaptedWeights(base=model.checkpoint, heads=heads, adapter=adapter),
        save_config=partial(_save_config, model.save_config, {**fields, "target_modules": _shortest(targets, modules)}),
        trained=(
            *(f"{target}.lora_{side}.default.weight" for target in sorted(targets) for side in "AB"),
            *sorted(heads),
        ),
        wide=frozenset(_beside(name, targets) for name in model.wide),
    )


def note_on_lora(model: Blueprint) -> str | None:
    """A sentence that says how much of a model with an adapter trains; None for other models."""
    if not model.trained:
        return None
    layers = model.on_meta
    numbers = {name: each.numel() for layer in layers for name, each in layer.full_parameters().items()}
    trains, modules = sum(numbers[name] for name in model.trained), sum(".lora_A." in name for name in model.trained)
    all_of_it = sum(number for name, number in numbers.items() if name not in model.tied)
    return f"LoRA trains {trains:,} of {all_of_it:,} parameters, {trains / all_of_it:.2%}, beside {modules} modules"


def require_library(what: str, library: str, package: str) -> None:
    """Raise ModelError, with the package to install, where a library is missing that a field needs."""
    lacks = find_spec(library) is None
    require((not lacks, f"{what} needs the library {library}, which is not installed: pip install {package}"))


def is_adapter(name: str) -> bool:
    """Whether a tensor of this full name belongs to an adapter's matrices."""
    return ADAPTER_MARK in name


def without_adapter(name: str) -> str:
    """What the model itself calls a weight that stands beside an adapter."""
    return name.replace(".base_layer.", ".")


def _beside(name: str, targets: Collection[str]) -> str:
    """What a weight of the model is called where an adapter stands beside it."""
    module, _, last = name.rpartition(".")
    return f"{module}.base_layer.{last}" if module in targets else name


def for_peft(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an adapter by the names in PEFT's files."""
    return {_PREFIX + name.replace(".default.", "."): tensor for name, tensor in tensors.items()}


def merged_state(stage: Stage, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The weights of a whole model by its own names, each adapter added to the weight beside it, as PEFT does it.

    The sum is made in float32, and keeps the digits that `dtype` has: in bf16 most of what an adapter adds is lost.
    """
    from peft.tuners.lora import LoraLayer

    for module in stage.modules():
        if isinstance(module, LoraLayer):
            adapted: Any = module
            base = adapted.get_base_layer()
            kept = torch.promote_types(base.weight.dtype, dtype)
            base.float()
            adapted.merge()
            base.to(kept)
    return {without_adapter(name): each for name, each in stage.full_state().items() if not is_adapter(name)}


def _known_to_peft(linear: Collection[str], model_type: str) -> set[str]:
    """Those of a model's linear modules that PEFT adapts by their names; it takes some names for those of experts."""
    from peft import LoraConfig

    config: Any = LoraConfig(target_modules=[*linear])
    with suppress(ImportError):  # of a PEFT that takes names as they are
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

        model: Any = SimpleNamespace(config=SimpleNamespace(model_type=model_type))
        convert_peft_config_for_transformers(config, model=model, conversions=None)
    past = (_READ_PAST, ".out_proj") if model_type in _OF_MAMBA else (_READ_PAST,)
    return {name for name in config.target_modules if not name.endswith(past)}


def _targets(
    options: LoraOptions, modules: Mapping[str, nn.Module], adaptable: Collection[str], head: str, model_type: str
) -> frozenset[str]:
    """The full names of the modules that get matrices."""
    if options.targets == ALL_LINEAR:
        inside = frozenset(adaptable) - {head}
        require((bool(inside), f"model.lora needs linear modules that PEFT adapts, and {model_type} has none"))
        return inside
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    def found(targets: str | list[str]) -> set[str]:
        config = LoraConfig(target_modules=targets)
        return {name for name in modules if name and check_target_module_exists(config, name)}

    wanted = [options.targets] if isinstance(options.targets, str) else options.targets
    nowhere = [word for word in wanted if not found(options.targets if word is options.targets else [word])]
    targets = found(options.targets)
    others = sorted(targets - set(adaptable))
    ends = sorted({name.rpartition(".")[2] for name in adaptable})
    require(
        (
            not nowhere,
            f"model.lora.targets must name linear modules of the model in a list, such as [{', '.join(ends[:2])}], or "
            f"be a regular expression for whole names, got {first_of(nowhere)}; it has {', '.join(ends)}",
        ),
        (not others, f"model.lora.targets must name linear modules that PEFT adapts, got {first_of(others)}"),
    )
    return frozenset(targets)


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by a matrix and does no more; a router of Llama 4 is a Linear that does."""
    from transformers.pytorch_utils import Conv1D

    own = type(module).__name__ == "FalconLinear"  # which rounds between product and sum
    return own or type(module).forward in (nn.Linear.forward, Conv1D.forward)


def _shortest(targets: Collection[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """The last words of the targets' names, as PEFT's users write them, where they mean the same modules."""
    ends = sorted({name.rpartition(".")[2] for name in targets})
    meant = {name for name in modules if name.rpartition(".")[2] in ends}
    return ends if meant == set(targets) else sorted(targets)


def _adapted(spec: LayerSpec, fields: Mapping[str, Any], targets: frozenset[str], heads: frozenset[str]) -> Layer:
    """Build a layer, give its targets their matrices, and freeze the rest."""
    from peft import LoraConfig, inject_adapter_in_model

    layer = spec.build()
    for name, part in list(layer.parts.items()):
        here = targets & {f"{name}.{inner}".strip(".") for inner, _ in part.named_modules()}
        if not here:
            continue
        # PEFT matches names from the root of what it is given: the part hangs where it is in the unsplit model
        tree = nn.Module()
        parent, (*path, last) = tree, name.split(".")
        for step in path:
            parent.add_module(step, nn.Module())
            parent = parent.get_submodule(step)
        parent.add_module(last, part)
        own = {key: value for key, value in fields.items() if key != "modules_to_save"}
        inject_adapter_in_model(LoraConfig(**own, target_modules=sorted(here)), tree)
        if (made := tree.get_submodule(name)) is not part:
            replace_module(layer, part, made)  # around the part, with its parameters
            layer.parts[name] = made
    for name, parameter in layer.full_parameters().items():
        parameter.requires_grad_(is_adapter(name) or name in heads)
    return layer


def _initialize(of_model: Initialize, full_name: str, module: nn.Module) -> None:
    """First values as PEFT's: the first matrix is drawn, the second is zero."""
    if not is_adapter(full_name):
        of_model(full_name, module)
        return
    for parameter in module.parameters(recurse=False):
        if ".lora_A." in full_name:
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
        else:
            nn.init.zeros_(parameter)


def _open(options: LoraOptions) -> Checkpoint:
    """The adapter to start from: a folder of PEFT, or a checkpoint of a run."""
    folder = Path(options.weights)
    files = [each for each in (folder / WEIGHTS_FILE, *sorted(folder.glob("stage-*/*.safetensors"))) if each.is_file()]
    if not files:
        raise ModelError(
            f"model.lora.weights must be {FRESH} or a folder with {WEIGHTS_FILE}, as PEFT saves it, got "
            f"{options.weights!r}"
        )
    if (folder / CONFIG_FILE).is_file():
        check_config(folder / CONFIG_FILE, options)
    names = [(str(path.relative_to(folder)), name) for path in files for name in read_headers(path)]
    stored = {_own_name(name): Stored(((file, name),)) for file, name in names if name.startswith((_PREFIX, WEIGHTS))}
    return Checkpoint(source=str(folder), stored=stored, tied={})


def _own_name(name: str) -> str:
    """The full name of a tensor in a file of PEFT or of a checkpoint."""
    if name.startswith(WEIGHTS):
        return name.removeprefix(WEIGHTS)
    plain = name.removeprefix(_PREFIX)
    return plain.replace(".weight", ".default.weight") if is_adapter(plain) else plain


def check_config(path: Path, options: LoraOptions) -> None:
    """Raise ModelError if the matrices of an adapter mean something else than those of the options."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        found = {name: config.get(name) or plain[0] for name, plain in _PLAIN.items()}
        rank, alpha = config["r"], config["lora_alpha"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} must be the configuration of an adapter, but it is damaged: {error!r}") from error
    strange = [f"{name} {value}" for name, value in found.items() if value not in _PLAIN[name]]
    require(
        (not strange, f"an adapter to start from must be a plain LoRA, and {path} has {', '.join(strange)}"),
        (rank == options.rank, f"model.lora.rank must be {rank}, as in {path}, got {options.rank}"),
        (alpha == options.scale, f"model.lora.alpha must be {alpha}, as in {path}, got {options.scale}"),
    )


def _save_config(of_model: Callable[[Path], None] | None, fields: Mapping[str, Any], folder: Path) -> None:
    from peft import LoraConfig

    if of_model is not None:
        of_model(folder)
    LoraConfig(**fields, inference_mode=True).save_pretrained(str(folder))
    written = json.loads((folder / CONFIG_FILE).read_text())
    written["target_modules"] = sorted(written["target_modules"])  # which PEFT holds as a set
    (folder / CONFIG_FILE).write_text(json.dumps(written, indent=2) + "\n")


_BLOCK = 64
"""Weights with one scale, a number of float32: 4.5 bits a weight."""


def linears(layer: Layer, kept: Collection[str] = ()) -> list[nn.Linear]:
    """The linear modules of a layer whose weights do not train, but those whose weights are `kept`."""
    modules = [each for name, each in layer.full_modules().items() if without_adapter(f"{name}.weight") not in kept]
    linear = [each for each in modules if isinstance(each, nn.Linear) and is_linear(each)]
    return [each for each in linear if not each.weight.requires_grad]


def to_four_bits(blocks: range, kept: Collection[str], index: int, layer: Layer) -> None:
    """Replace the linear modules of a layer that do not train by such with weights of 4 bits, if it is a block.

    `kept` are the full names of weights that stay as they are.
    """
    if index not in blocks:
        return
    for linear in linears(layer, kept):
        replace_module(layer, linear, FourBits(linear))


class FourBits(nn.Module):
    """A frozen linear module. Its weight is uint8 [numbers / 2, 1]; it computes in the type of its inputs."""

    def __init__(self, linear: nn.Linear) -> None:
        """On the meta device only the bytes are as those of a weight with values."""
        super().__init__()
        weight = linear.weight.detach()
        packed, state = torch.empty(weight.numel() // 2, 1, dtype=torch.uint8, device="meta"), None
        if not weight.is_meta:
            bits: Any = import_module("bitsandbytes")
            packed, state = bits.functional.quantize_4bit(weight, blocksize=_BLOCK, quant_type="nf4")
        self.weight, self.bias = nn.Parameter(packed, requires_grad=False), linear.bias
        self.given = {"shape": weight.shape, "dtype": weight.dtype, "blocksize": _BLOCK, "quant_type": "nf4"}
        for name in ("absmax", "code"):
            self.register_buffer(name, None if state is None else getattr(state, name), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The linear module's output."""
        bits: Any = import_module("bitsandbytes")
        given: dict[str, Any] = {**self.given, "absmax": self.absmax, "code": self.code}
        bias = None if self.bias is None else self.bias.to(x.dtype)
        found: Tensor = bits.matmul_4bit(x, self.weight.t(), quant_state=bits.functional.QuantState(**given), bias=bias)
        return found
