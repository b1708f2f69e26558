"""Models of transformers: a configuration of the library's, read once, and what the library says of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thinwire.errors.calls import message_of
from thinwire.errors.names import did_you_mean
from thinwire.models import hub
from thinwire.models.architectures.library import (
    fields_of_blocks,
    take_apart,
    tasks_of,
    text_model_of,
    unsplit,
    wide_names,
    without_weights,
)
from thinwire.models.architectures.parity import check_parity, remembers
from thinwire.models.checkpoint import in_place_of_weights
from thinwire.models.data.parts import BYTES, local_path
from thinwire.models.data.tokenizer import load_tokenizer
from thinwire.models.errors import ModelError, require
from thinwire.models.layers import Blueprint
from thinwire.models.lora import linears, require_library, to_four_bits, with_lora
from thinwire.models.options import FRESH, PRETRAINED, ModelOptions
from thinwire.models.smollm2 import place_of
from thinwire.models.source import ModelSource, Use
from thinwire.models.tasks import TaskName

_LARGEST = {"layer": 10_000, "labels": 1_000_000, "max_position": 2**24}
"""The largest values of a configuration's fields, by a part of their names: each layer is built, and each position of
some models has a value, before any weight is read."""
_MOST_BLOCKS = 128
"""The most blocks that are built to count parameters: a model of thousands would take minutes."""
_PEFT_TASKS: Mapping[TaskName, str] = {
    "causal-lm": "CAUSAL_LM",
    "classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
}
_BEGIN, _END, _PAD = "bos_token_id", "eos_token_id", "pad_token_id"
_UNLISTED = {
    "deberta-v2": (
        *("position_buckets", "norm_rel_ebd", "share_att_key", "embedding_size", "pooler_hidden_size"),
        *("conv_kernel_size", "conv_groups", "conv_act", "cls_dropout"),
    )
}
"""Fields of a type of configuration that the library reads but does not list among its defaults."""


@dataclass(frozen=True)
class LibrarySource(ModelSource):
    """A model of transformers, with its configuration."""

    reads = "text"
    config: Any
    """With the overrides of the options. Of a model of text and images whose text model is one of its own, as Qwen3.5:
    that of the text model."""
    inside: str
    """The type of the model of text and images; empty for others."""
    by_type: bool
    """Whether the name is a type, whose configuration no file says."""
    weights: str | None
    """The folder of the weights, or their name on the hub; None means that they are drawn."""

    @classmethod
    def of(cls, options: ModelOptions) -> LibrarySource:
        """The model by its type, its folder or its name on the hub.

        Raises:
            ModelError: there is no such model, no task here is one of its, or the library refuses the configuration.
        """
        if options.lora.rank is not None:
            require_library("model.lora", "peft", "'thinwire[lora]'")
            if options.dtype == "nf4":
                require_library("model.dtype nf4", "bitsandbytes", "bitsandbytes")
        by_type = _is_type(options)
        config, inside = _config(options, by_type)
        of_text = getattr(config, "text_config", None)
        if of_text is not None and "causal-lm" in tasks_of(of_text.model_type):
            raise ModelError(
                f"a model must be one that reads text alone, and {config.model_type} reads more; take "
                f"{of_text.model_type}, or save the text model of a pretrained one by itself, as "
                "docs/reference/models.md shows"
            )
        if not tasks_of(config.model_type):
            raise ModelError(_no_such_type(config.model_type))
        weights, quantized = _place(options), getattr(config, "quantization_config", None)
        if weights is not None and quantized:
            is_named = isinstance(quantized, dict)
            method = quantized.get("quant_method", "") if is_named else type(quantized).__name__
            raise ModelError(
                f"{weights} must hold weights that are not quantized, got {method}; take the model that was quantized"
            )
        return cls(options, config, inside, by_type, weights)

    @property
    def parameters(self) -> int | None:
        """The parameters of the whole model, which take no memory; blocks beyond some hundred are as the last one."""
        count = getattr(self.config, "num_hidden_layers", None)
        if type(count) is not int or count < 1:
            return None
        built = min(count, _MOST_BLOCKS)
        try:
            found = _parameters(self.config, built)
            return found if built == count else found + (count - built) * (found - _parameters(self.config, built - 1))
        except Exception:  # of the library, which checks fields in its own ways; it says so again when it is built
            return None

    @property
    def left_to_tokenizer(self) -> list[str]:
        """The fields of its configuration that its tokenizer knows: the defaults of a type are for another one."""
        return [name for name in (_BEGIN, _END) if self.by_type and name not in self.options.config]

    def note_on_tokenizer(self, tokenizer: str) -> str | None:
        """A sentence if pretrained weights know other tokens than those of the data's tokenizer; None if not."""
        name = self.options.name
        if self.weights is None or name == tokenizer or self.by_type:
            return None
        try:
            loaded = load_tokenizer(name)
        except ModelError:  # it came without one
            return None
        own = {token: number for token, number in loaded.get_vocab().items() if token not in loaded.all_special_tokens}
        given = {} if tokenizer == BYTES else load_tokenizer(tokenizer).get_vocab()
        if 2 * sum(given.get(token) == number for token, number in own.items()) >= len(own):  # some may be added
            return None
        return (
            f"data.tokenizer {tokenizer} gives tokens other numbers than the tokenizer of {name}, which the pretrained "
            f"weights know; unless the data are token ids, take data.tokenizer {name}"
        )

    def _layers(self, use: Use) -> Blueprint:
        made, lora, source = self._whole(use), self.options.lora, self.weights
        if lora.rank is None:
            return made
        assert source is not None, "the options are checked"
        base = str(Path(source).resolve()) if Path(source).is_dir() else source
        adapted = with_lora(made, lora, base, _PEFT_TASKS[use.task], self.config.model_type)
        if self.options.dtype != "nf4":
            return adapted
        blocks = range(1, len(adapted.layers) - 1)
        some = any(linears(layer) for layer in adapted.on_meta[1:-1])
        name = self.options.name
        require((some, f"model.dtype nf4 needs linear modules, and the blocks of {name} have none; take bf16"))
        # what the library never quantizes is what it would keep wide in float16
        kept = wide_names(without_weights(self.config, use.task, torch.float16), torch.float16)
        return replace(adapted, narrow=partial(to_four_bits, blocks, kept))

    def _whole(self, use: Use) -> Blueprint:
        """The model in layers, without an adapter."""
        config, task, model_type = copy.deepcopy(self.config), use.task, self.config.model_type
        able = ["causal-lm"] if self.inside else tasks_of(model_type)
        if task not in able:
            name = self.inside or model_type
            raise ModelError(f"the task of {name} must be {' or '.join(able)}, got {task}; take another model")
        reads_padding, padding = task == "classification" and "causal-lm" in able, getattr(config, "pad_token_id", None)
        if reads_padding and padding is None:
            raise ModelError(
                f"a classifier of the type {model_type} reads the last token before the padding, so its config must "
                f"have the pad_token_id of the tokenizer, got none"
            )
        if use.num_labels is not None and task != "causal-lm":
            config.num_labels = use.num_labels
        narrow = None
        if self.options.dtype != "fp32":  # the library notes the dtype in the configuration that it is given
            narrow = without_weights(copy.deepcopy(config), task, torch.bfloat16)
        made = take_apart(
            config,
            task,
            block_size=use.block_size,
            source=self.weights,
            tied=self.options.tied or ("untie" if self.options.lora.rank is not None else None),
            step_tokens=use.step_tokens,
            narrow=narrow,
        )
        return replace(
            made,
            inside=self.inside,
            wide=frozenset() if narrow is None else wide_names(narrow, torch.bfloat16),
            compare=partial(check_parity, config, task, packed=use.packed),
            remembers=partial(remembers, config, task),
            padding=padding if reads_padding else None,
        )


def _place(options: ModelOptions) -> str | None:
    """Where a model takes its weights from; None means that they are drawn."""
    if options.weights == FRESH:
        return None
    other = options.weights != PRETRAINED
    if other and not Path(options.weights).is_dir():
        raise ModelError(
            f"weights must be {FRESH}, {PRETRAINED} or a folder that exists for {options.name!r}, got "
            f"{options.weights!r}"
        )
    return options.weights if other else place_of(options.name)


def _config(options: ModelOptions, by_type: bool) -> tuple[Any, str]:
    """The configuration, with the overrides of the options; and the type of the model that it is inside of."""
    from transformers import AutoConfig, PreTrainedConfig

    if by_type and not tasks_of(options.name):
        raise ModelError(_no_such_type(options.name))
    try:
        if by_type:
            _refuse_sizes(options.name, options.config)
            defaults, inside = text_model_of(AutoConfig.for_model(options.name))
            _refuse_unknown(defaults, options.config)
            config = type(defaults)(**_without_special_tokens(defaults, options.config))
            if _END not in options.config and hasattr(config, _END):  # the tokenizer knows
                setattr(config, _END, None)
            return config, inside
        rule = "a model must be a folder, a name on the hub, module:factory or a type of transformers such as gpt2"
        name = place_of(options.name)
        folder = local_path(name, rule, own=True)
        if folder is not None and not (folder / "config.json").is_file():
            instead = in_place_of_weights(str(folder))
            held = f"; it holds {instead}" if instead else ""
            raise ModelError(f"{folder} must be the folder of a model, with its config.json{held}")
        with hub.reading(name):
            stored, _ = PreTrainedConfig.get_config_dict(str(folder or name))
        _refuse_sizes(options.name, {**stored, **options.config})
        pretrained, inside = text_model_of(hub.load(AutoConfig, name))
        _refuse_unknown(pretrained, options.config)
        if inside:
            return type(pretrained).from_dict(pretrained.to_dict(), **options.config), inside
        return hub.load(AutoConfig, name, **options.config), inside
    except ModelError:
        raise
    except OSError as error:
        raise ModelError(_not_on_hub(options.name, error)) from error
    except Exception as error:
        raise ModelError(f"transformers refuses the configuration of {options.name!r}: {message_of(error)}") from error


def _is_type(options: ModelOptions) -> bool:
    """Whether the model is a type of transformers by its name, whose configuration no file says."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    is_folder = Path(options.name, "config.json").is_file()  # another folder of that name is not meant
    return options.weights != PRETRAINED and options.name in CONFIG_MAPPING and not is_folder


def _not_on_hub(name: str, error: OSError) -> str:
    """Why a name is no model, and what to take in its place."""
    why = hub.reason(name, error)
    if hub.unreachable():
        return f"the model {name!r} cannot be had: {why}; name a folder, or run once where the hub can be reached"
    return f"there is no model {name!r}{did_you_mean(name, _names())}: {why}; {_supported()}"


def _refuse_sizes(name: str, fields: Mapping[str, Any]) -> None:
    """Refuse what would take memory or hours before the model is built."""
    large = [
        f"{field} {value}"
        for field, value in fields.items()
        for part, most in _LARGEST.items()
        if part in field.replace("per_layer", "") and isinstance(value, int) and value > most
    ]
    most = ", ".join(f"{part} up to {most}" for part, most in _LARGEST.items())
    require((not large, f"the configuration of {name} must have {most}, got {', '.join(large)}"))


def _refuse_unknown(config: Any, overrides: dict[str, Any]) -> None:
    known = {*config.to_dict(), *config.attribute_map, "num_labels", *_UNLISTED.get(config.model_type, ())}
    unknown = [f"{name!r}{did_you_mean(name, known, most=1)}" for name in overrides if name not in known]
    require((not unknown, f"a configuration of {config.model_type} has no {', '.join(unknown)}"))


def _without_special_tokens(defaults: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """Add overrides that remove special tokens which a smaller vocabulary does not have."""
    size = overrides.get("vocab_size", getattr(defaults, "vocab_size", math.inf))
    tokens = {name: getattr(defaults, name, None) for name in (_BEGIN, _END, _PAD)}
    beyond = [name for name, token in tokens.items() if isinstance(token, int) and token >= size]
    return {**dict.fromkeys(beyond), **overrides}


def _no_such_type(model_type: str) -> str:
    return f"model type {model_type!r} is not supported{did_you_mean(model_type, _names())}: {_supported()}"


def _names() -> list[str]:
    """The names of models that need no hub."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from thinwire.models.architectures.vision import VISION

    return [*(name for name in CONFIG_MAPPING.keys() if tasks_of(name)), *VISION]  # noqa: SIM118


def _supported() -> str:
    return (
        "take one that AutoModelForCausalLM, AutoModelForSequenceClassification or AutoModelForTokenClassification of "
        "transformers knows, or give layers as module:factory, a function that returns its layers in order"
    )


def _parameters(config: Any, blocks: int) -> int:
    """The parameters of a model of so many blocks."""
    small = type(config).from_dict(config.to_dict() | fields_of_blocks(config, blocks) | {"tie_word_embeddings": False})
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = unsplit(small, tasks_of(config.model_type)[0])
    return sum(parameter.numel() for parameter in model.parameters())
