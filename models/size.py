"""The number of parameters of a model, found before the model is built: thousands of layers take minutes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from thinwire.models.model import find_config, is_factory
from thinwire.models.options import ModelOptions


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
