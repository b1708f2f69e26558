"""Reading the YAML of a recipe. It is measured first: a few hundred bytes with aliases can fill the memory.

Nothing is built before the length of the text, its depth and its number of values (with aliases) are checked.
"""

from __future__ import annotations

from typing import Any

import yaml

from thinwire.pipeline.errors import OptionsError

MOST_CHARACTERS = 200_000
MOST_LEVELS = 20
MOST_VALUES = 20_000


def load_yaml(text: str, where: str) -> Any:
    """The value of a YAML text. OptionsError if it is not valid YAML, or larger than a recipe can be."""
    try:
        if len(text) > MOST_CHARACTERS:
            raise OptionsError(f"{where} must have at most {MOST_CHARACTERS} characters, got {len(text)}")
        _measure(text, where)
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, OptionsError):
            raise
        raise OptionsError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error


class _Loader(yaml.SafeLoader):
    """A safe loader for which a field may stand only once. YAML's own takes the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node."""
        names: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in names:
                    raise yaml.YAMLError(f"line {key.start_mark.line + 1}: {key.value} must stand only once")
                names.add(key.value)
        return super().construct_mapping(node, deep)


def _measure(text: str, where: str) -> None:
    """Raise OptionsError if a value is too deep, too large with its aliases, or part of itself."""
    sizes: dict[str, int] = {}
    open_: list[tuple[str | None, int]] = [(None, 0)]  # the anchor and size of what surrounds the event
    for event in yaml.parse(text):
        size, anchor = 0, getattr(event, "anchor", None)
        if isinstance(event, yaml.CollectionStartEvent):
            if len(open_) > MOST_LEVELS:
                raise OptionsError(f"{where} must be nested at most {MOST_LEVELS} levels deep")
            open_.append((anchor, 1))
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == surrounding for surrounding, _ in open_):
                raise OptionsError(f"{where} must not hold a value that is part of itself, as *{anchor} is")
            size = sizes.get(str(anchor), 1)
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_.pop()
        if size:
            surrounding, before = open_[-1]
            open_[-1] = (surrounding, before + size)
            if anchor is not None:
                sizes[anchor] = size
        if open_[-1][1] > MOST_VALUES:
            raise OptionsError(f"{where} must hold at most {MOST_VALUES} values, those of aliases counted each time")
