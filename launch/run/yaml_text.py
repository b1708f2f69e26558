"""Reading the YAML of a recipe or a study. It is measured first: a few hundred bytes with aliases can fill the memory.

Nothing is built before the length of the text, its depth and its number of values (with aliases) are checked.
"""

from __future__ import annotations

import re
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError

from thinwire.errors.names import did_you_mean
from thinwire.pipeline.errors import OptionsError

MOST_CHARACTERS = 200_000
MOST_LEVELS = 20
MOST_VALUES = 20_000

_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
"""The tag of the key `<<`."""


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
        said = " ".join(str(error).split())
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            said = f"line {error.problem_mark.line + 1}: {error.problem}"
        raise OptionsError(f"{where} is not valid YAML: {said}") from error


def packaged_names(folder: Traversable) -> list[str]:
    """The names of packaged YAML files."""
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def descriptions(folder: Traversable) -> dict[str, str]:
    """What packaged YAML files say of themselves, by name."""
    texts = {name: (folder / f"{name}.yaml").read_text() for name in packaged_names(folder)}
    return {name: yaml.safe_load(text)["description"] for name, text in texts.items()}


def read_named(named: str, folder: Traversable, must: str) -> str:
    """The text of a packaged YAML file, or of one at a path. OptionsError, beginning with `must`, if there is none."""
    known, path = packaged_names(folder), Path(named)
    if named in known:
        return (folder / f"{named}.yaml").read_text()
    if not path.is_file():
        got = "a folder" if path.is_dir() else repr(named)
        raise OptionsError(
            f"{must} or the path of a YAML file, got {got}{did_you_mean(named, known)}; known: {', '.join(known)}"
        )
    try:
        with path.open() as file:
            return file.read(10 * MOST_CHARACTERS)  # a file has no end, or claims to be larger than any memory
    except (OSError, UnicodeDecodeError) as error:
        raise OptionsError(f"{path} cannot be read: {error}") from error


def fields_in(text: str, where: str, what: str) -> dict[Any, Any]:
    """The fields in a YAML text of a recipe or a study. OptionsError as `load_yaml`, or if it holds none."""
    loaded = load_yaml(text, where)
    if not isinstance(loaded, dict):
        got = "nothing" if loaded is None else type(loaded).__name__
        raise OptionsError(f"{where} must hold the fields of a {what}, got {got}")
    return loaded


def dump_yaml(value: Any) -> str:
    """The YAML text of a value, as `load_yaml` reads it."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """A safe loader of what JSON has, for which a field may stand only once, and `<<` means what YAML says.

    YAML's own takes the last of equal fields without a word. Of merged ones (PyYAML 6.0.4), it takes now the first, now
    the last. It reads 010 as 8, 1:30 as 90 and 2026-01-31 as a date: here they are text.
    """

    yaml_constructors = {
        tag: made
        for tag, made in yaml.SafeLoader.yaml_constructors.items()
        if tag not in {f"{_TAG}{kind}" for kind in ("binary", "omap", "pairs", "set", "timestamp")}
    }
    yaml_implicit_resolvers = dict[str, list[Any]]()

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """The node of a mapping, before what it merges is added to it."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        names = set()
        for key, _ in node.value:
            if _name(key) in names and key.tag != _MERGE:
                raise ComposerError(None, None, f"{key.value} must stand only once", key.start_mark)
            names.add(_name(key))
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put what `<<` merges in its place: own fields count before merged ones, earlier groups before later ones."""
        own, pairs = [], dict[Any, tuple[yaml.Node, yaml.Node]]()
        for key, value in node.value:
            if key.tag != _MERGE:
                own.append((key, value))
                continue
            for group in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if not isinstance(group, yaml.MappingNode):
                    raise yaml.YAMLError(f"line {group.start_mark.line + 1}: << must be followed by groups of fields")
                self.flatten_mapping(group)
                for pair in group.value:
                    pairs.setdefault(_name(pair[0]), pair)
        node.value = [*(pairs | {_name(key): (key, value) for key, value in own}).values()]


for _kind, _pattern in {
    "null": r"(?i:null|~|)",
    "bool": r"(?i:yes|no|true|false|on|off)",
    "int": r"[-+]?(0|[1-9][0-9_]{0,999}|0x[0-9a-fA-F]{1,999})",
    "float": r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|(?i:\.inf))|(?i:\.nan)",
    "merge": r"<<",
}.items():
    _Loader.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(rf"(?:{_pattern})\Z"), None)


class _Dumper(yaml.SafeDumper):
    """Writes text in quotes where the loader would read something else."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def _name(key: yaml.Node) -> Any:
    """What distinguishes a field of a group from the others."""
    return key.value if isinstance(key, yaml.ScalarNode) else id(key)


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
