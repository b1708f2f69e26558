"""The names of tensors in the files of transformers and in its models: it renames, and joins experts, as it reads.

The library's own tables say how. Tensors that become one are read together: while it reads, a stage holds its own
weights and twice the largest of them, such as the experts of a block.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from thinwire.models.checkpoint import Stored


def as_in_model(model: Any, places: Mapping[str, str]) -> dict[str, Stored]:
    """Where the tensors of a model are, by their names in the model, if files hold these names: name -> file.

    A name that is nowhere in the model stays as it is.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    own, base = set(model.state_dict()), f"{model.base_model_prefix}."

    def in_model(name: str) -> str | None:
        return next((each for each in (name, base + name, name.removeprefix(base)) if each in own), None)

    found: dict[str, Stored] = {}
    joined: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for key in sorted(places, key=dot_natural_key):  # experts by their numbers
        renamed, pattern = rename_source_key(key, renamings, converters)
        name = in_model(renamed)
        if name is not None and pattern is not None:
            joined[name].append((key, pattern))
        else:
            found[name or in_model(key) or key] = Stored(((places[key], key),))
    for first, pairs in joined.items():
        converter = by_pattern[pairs[0][1]]
        parts = tuple((places[key], key) for key, _ in pairs)
        for target in converter.target_patterns:
            name = first.replace(converter.target_patterns[0], target)
            found[name] = Stored(parts, partial(_converted, model, converter, pairs, first, name))
    return found


def _converted(
    model: Any, converter: Any, pairs: Iterable[tuple[str, str]], first: str, name: str, tensors: Sequence[Tensor]
) -> Tensor:
    """What the library makes of stored tensors, whose names and patterns are `pairs`, for one of its own."""
    once = copy.deepcopy(converter)
    for (key, pattern), tensor in zip(pairs, tensors, strict=True):
        once.add_tensor(first, key, pattern, tensor)
    found = once.convert(first, model=model, config=model.config)[name]
    result: Tensor = found[0] if isinstance(found, list) else found
    return result


def as_stored(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a model as its `save_pretrained` would name and divide them, each with memory of its own."""
    from transformers.core_model_loading import revert_weight_conversion

    found = revert_weight_conversion(model, dict(state))
    return {
        name: tensor.clone() if tensor.nbytes < tensor.untyped_storage().nbytes() else tensor
        for name, tensor in found.items()
    }
