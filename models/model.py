"""The model of a run. A type of model, a pretrained model or your own factory becomes a blueprint."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from thinwire.errors.names import did_you_mean
from thinwire.models import hub
from thinwire.models.data.options import BYTES
from thinwire.models.data.parts import local_path
from thinwire.models.data.tokenizer import load_tokenizer
from thinwire.models.errors import ModelError, require
from thinwire.models.layers import Blueprint
from thinwire.models.lora import linears, require_library, to_four_bits, with_lora
from thinwire.models.options import FRESH, PRETRAINED, ModelOptions
from thinwire.models.smollm2 import place_of
from thinwire.models.tasks import TaskName

_LARGEST = {"layer": 10_000, "labels": 1_000_000, "max_position": 2**24}
"""The largest values of a configuration's fields, by a part of their names: each layer is built, and each position of
some models has a value, before any weight is read."""
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


def check_name(options: ModelOptions) -> None:
    """Check, before any data is read, that the model and its configuration exist.

    Raises:
        ModelError: they do not.
    """
    of_transformers = not is_factory(options) and _reads(options) == "text"
    if options.lora.rank is not None:
        require(
            (
                of_transformers,
                f"model.lora needs a language model or a classifier of text, by its name or folder, got {options.name}",
            )
        )
        require_library("model.lora", "peft", "'thinwire[lora]'")
        if options.dtype == "nf4":
            require_library("model.dtype nf4", "bitsandbytes", "bitsandbytes")
    if of_transformers:
        find_config(options)


def check_reads(options: ModelOptions, *, kind: Literal["text", "images"], channels: int | None = None) -> None:
    """Check that a model reads this kind of data: text, or images with this number of channels.

    Raises:
        ModelError: it reads the other kind, or images with another number of channels.
    """
    reads = _reads(options)
    own = is_factory(options)
    others = {"text": "a language model or a classifier of text", "images": "a vision model such as resnet18"}
    require(
        (
            own or reads == kind,
            f"{options.name} reads {reads}, but the data are {kind}; take {others[kind]}, or set data.kind",
        ),
        (
            own or kind == "text" or reads == "text" or channels == 3,
            f"{options.name} reads images of 3 channels, got {channels}; set data.channels to 3",
        ),
    )


def _reads(options: ModelOptions) -> Literal["text", "images"]:
    """The kind of data that a model reads, if it does not come from a factory."""
    from thinwire.models.architectures.vision import VISION

    return "images" if options.name in VISION else "text"


def is_factory(options: ModelOptions) -> bool:
    """Whether a function of the user makes the model."""
    return ":" in options.name and not Path(options.name).exists()


def blueprint(
    options: ModelOptions, *, task: TaskName, num_labels: int | None = None, block_size: int | None = None
) -> Blueprint:
    """The model in layers. `block_size` is the number of tokens in a sample; costs depend on it.

    Raises:
        ModelError: there is no such model, it does not do this task, or its library refuses the configuration.
    """
    if is_factory(options):
        from thinwire.models.architectures.sequential import factory_blueprint

        return _with_weights(factory_blueprint(options.name, options.config), options)
    from thinwire.models.architectures.vision import VISION, vision_blueprint

    if options.name in VISION:
        return _with_weights(vision_blueprint(options.name, options.config, num_labels), options, num_labels)
    made = _transformer(options, task, num_labels, block_size)
    if options.lora.rank is None:
        return made
    source = _source(options) or ""
    base = str(Path(source).resolve()) if Path(source).is_dir() else source
    adapted = with_lora(made, options.lora, base, _PEFT_TASKS[task], find_config(options)[0].model_type)
    if options.dtype != "nf4":
        return adapted
    blocks = range(1, len(adapted.layers) - 1)
    some = any(linears(layer) for layer in adapted.on_meta[1:-1])
    require((some, f"model.dtype nf4 needs linear modules, and the blocks of {options.name} have none; take bf16"))
    return replace(adapted, narrow=partial(to_four_bits, blocks))


def library_code(options: ModelOptions, num_labels: int | None) -> str:
    """Lines of Python that make the unsplit model as the variable `model`, for models that transformers lacks."""
    from thinwire.models.architectures.vision import VISION, library_lines

    if options.name in VISION:
        return library_lines(options.name, options.config, num_labels)
    module, _, factory = options.name.partition(":")
    given = ", ".join(f"{name}={value!r}" for name, value in options.config.items())
    return (
        f"from torch import nn\n\nfrom {module} import {factory}\n\nmade = {factory}({given})\n"
        "model = made if isinstance(made, nn.Sequential) else nn.Sequential(*made)"
    )


def note_on_tokenizer(options: ModelOptions, tokenizer: str) -> str | None:
    """A sentence if a pretrained model was trained with another tokenizer than that of the data; None if not."""
    if options.weights == FRESH or options.name == tokenizer or _is_type(options):
        return None
    try:
        loaded = load_tokenizer(options.name)
    except ModelError:  # it came without one
        return None
    own = {token: number for token, number in loaded.get_vocab().items() if token not in loaded.all_special_tokens}
    given = {} if tokenizer == BYTES else load_tokenizer(tokenizer).get_vocab()
    if 2 * sum(given.get(token) == number for token, number in own.items()) >= len(own):  # some may have been added
        return None
    return (
        f"data.tokenizer {tokenizer} gives tokens other numbers than the tokenizer of {options.name}, which the "
        f"pretrained weights know; unless the data are token ids, take data.tokenizer {options.name}"
    )


def check_fits(model: Blueprint, *, vocab_size: int | None, block_size: int | None) -> None:
    """Check that a model can read tokens below `vocab_size`, in samples of `block_size` tokens.

    Raises:
        ModelError: one of the two is too large; a sentence for each.
    """
    tokens, readable = vocab_size or 0, model.vocab_size
    length, longest = block_size or 0, model.max_positions
    wider = ", or raise vocab_size in config" if model.checkpoint is None else ", or set weights: fresh"
    require(
        (
            readable is None or tokens <= readable,
            f"the model's vocab_size must be at least the tokenizer's {tokens}, got {readable}; take the model's own "
            f"tokenizer{wider}",
        ),
        (
            longest is None or length <= longest,
            f"block_size must be at most the model's {longest} positions, got {length}",
        ),
    )


def _with_weights(made: Blueprint, options: ModelOptions, num_labels: int | None = None) -> Blueprint:
    """The same model with the weights that the options ask for. Not for models of transformers."""
    from thinwire.models.architectures.vision import HEADS, TORCHVISION_CLASSES, VISION, weights_folder
    from thinwire.models.checkpoint import open_checkpoint

    if options.weights == FRESH:
        return made
    own = Path(options.weights).is_dir()
    require(
        (
            own or options.name in VISION,
            f"weights must be {FRESH} or a folder with model.safetensors for {options.name!r}, got {options.weights!r}",
        )
    )
    weights = "DEFAULT" if options.weights == PRETRAINED else options.weights
    folder = options.weights if own else str(weights_folder(options.name, weights))
    checkpoint = open_checkpoint(folder)
    other_classes = not own and num_labels not in (None, TORCHVISION_CLASSES)
    return replace(made, checkpoint=checkpoint.without(HEADS) if other_classes else checkpoint)


def _transformer(options: ModelOptions, task: TaskName, num_labels: int | None, block_size: int | None) -> Blueprint:
    from thinwire.models.architectures.library import take_apart, tasks_of
    from thinwire.models.architectures.parity import check_parity, remembers

    config, inside = find_config(options)
    source = _source(options)
    method = getattr(config, "quantization_config", None)
    able = ["causal-lm"] if inside else tasks_of(config.model_type)
    if source is not None and method:
        quantized = method.get("quant_method", "") if isinstance(method, dict) else type(method).__name__
        raise ModelError(
            f"{source} must hold weights that are not quantized, got {quantized}; take the model that was quantized"
        )
    if task not in able:
        name = inside or config.model_type
        raise ModelError(f"the task of {name} must be {' or '.join(able)}, got {task}; take another model")
    reads_padding, padding = task == "classification" and "causal-lm" in able, getattr(config, "pad_token_id", None)
    if reads_padding and padding is None:
        raise ModelError(
            f"a classifier of the type {config.model_type} reads the last token before the padding, so its config must "
            f"have the pad_token_id of the tokenizer, got none"
        )
    if num_labels is not None and task != "causal-lm":
        config.num_labels = num_labels
    made = take_apart(config, task, block_size=block_size, source=source, tied=options.tied or "untie")
    return replace(
        made,
        inside=inside,
        compare=partial(check_parity, config, task),
        remembers=partial(remembers, config, task),
        padding=padding if reads_padding else None,
    )


def find_config(options: ModelOptions) -> tuple[Any, str]:
    """The configuration of a model of transformers, with the overrides of the options.

    Of a model of text and images whose text model is one of its own, as Qwen3.5: that of the text model, and the type
    of the whole. The type is empty for others.

    Raises:
        ModelError: there is no such model, no task here is one of its, or the library refuses the configuration.
    """
    from thinwire.models.architectures.library import tasks_of

    config, inside = _config(options)
    of_text = getattr(config, "text_config", None)
    if of_text is not None and "causal-lm" in tasks_of(of_text.model_type):
        raise ModelError(
            f"a model must be one that reads text alone, and {config.model_type} reads more; take "
            f"{of_text.model_type}, or save the text model of a pretrained one by itself, as docs/reference/models.md "
            "shows"
        )
    if not tasks_of(config.model_type):
        raise ModelError(_no_such_type(config.model_type))
    return config, inside


def _source(options: ModelOptions) -> str | None:
    """Where a model of transformers takes its weights from; None means that they are drawn."""
    if options.weights == FRESH:
        return None
    other = options.weights != PRETRAINED
    require(
        (
            not other or Path(options.weights).is_dir(),
            f"weights must be {FRESH}, {PRETRAINED} or a folder that exists for {options.name!r}, got "
            f"{options.weights!r}",
        )
    )
    return options.weights if other else place_of(options.name)


def _config(options: ModelOptions) -> tuple[Any, str]:
    """The configuration, with the overrides of the options; and the type of the model that it is inside of."""
    from transformers import AutoConfig, PreTrainedConfig

    from thinwire.models.architectures.library import tasks_of, text_model_of

    by_type = _is_type(options)
    if by_type and not tasks_of(options.name):
        raise ModelError(_no_such_type(options.name))
    try:
        if by_type:
            _refuse_sizes(options.name, options.config)
            defaults, inside = text_model_of(AutoConfig.for_model(options.name))
            _refuse_unknown(defaults, options.config)
            config = type(defaults)(**_without_special_tokens(defaults, options.config))
            if _END in of_tokenizer(options) and hasattr(config, _END):
                setattr(config, _END, None)
            return config, inside
        rule = "a model must be a folder, a name on the hub, module:factory or a type of transformers such as gpt2"
        name = place_of(options.name)
        folder = local_path(name, rule, own=True)
        if folder is not None and not (folder / "config.json").is_file():
            raise ModelError(_not_a_model(folder))
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
        raise ModelError(f"transformers refuses the configuration of {options.name!r}: {_first_line(error)}") from error


def _is_type(options: ModelOptions) -> bool:
    """Whether the model is a type of transformers by its name, whose configuration no file says."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    is_folder = Path(options.name, "config.json").is_file()  # another folder of that name is not meant
    return options.weights != PRETRAINED and options.name in CONFIG_MAPPING and not is_folder


def of_tokenizer(options: ModelOptions) -> list[str]:
    """The fields of a model's configuration that its tokenizer knows: the defaults of a type are for another one."""
    return [name for name in (_BEGIN, _END) if name not in options.config] if _is_type(options) else []


def _not_a_model(folder: Path) -> str:
    from thinwire.models.checkpoint import in_place_of_weights

    instead = in_place_of_weights(str(folder))
    return f"{folder} must be the folder of a model, with its config.json" + (
        f"; it holds {instead}" if instead else ""
    )


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
        if part in field and isinstance(value, int) and value > most
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

    from thinwire.models.architectures.library import tasks_of
    from thinwire.models.architectures.vision import VISION

    return [*(name for name in CONFIG_MAPPING.keys() if tasks_of(name)), *VISION]  # noqa: SIM118


def _supported() -> str:
    return (
        "take one that AutoModelForCausalLM, AutoModelForSequenceClassification or AutoModelForTokenClassification of "
        "transformers knows, or give layers as module:factory, a function that returns its layers in order"
    )


def _first_line(error: Exception) -> str:
    """The first line of an error's message, and the second if the first ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def count_parameters(options: ModelOptions) -> int | None:
    """The parameters of a whole model; None if only building it shows them. The weights of a new head may be left out.

    Of a model of transformers, no more than two blocks are built, and they take no memory.

    Raises:
        ModelError: there is no such model, or its library refuses the configuration.
    """
    if is_factory(options):
        from thinwire.models.architectures.sequential import factory_blueprint

        return int(sum(layer.cost for layer in factory_blueprint(options.name, options.config).layers))
    from thinwire.models.architectures.vision import VISION, make_vision

    if options.name in VISION:
        with suppress(Exception), torch.device("meta"):  # of torchvision; it is reported when the model is built
            return _parameters_of(make_vision(options.name, options.config))
        return None
    config, _ = find_config(options)
    count = getattr(config, "num_hidden_layers", None)
    if type(count) is not int or count < 1:
        return None
    try:
        one, two = (_parameters(config, blocks) for blocks in (1, 2))
    except Exception:  # of the library, which checks fields in its own ways; it says so again when the model is built
        return None
    return one + (count - 1) * (two - one)


def _parameters(config: Any, blocks: int) -> int:
    """The parameters of a model of so many blocks."""
    from thinwire.models.architectures.library import fields_of_blocks, tasks_of, unsplit

    small = type(config).from_dict(config.to_dict() | fields_of_blocks(config, blocks) | {"tie_word_embeddings": False})
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return _parameters_of(unsplit(small, tasks_of(config.model_type)[0]))


def _parameters_of(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
