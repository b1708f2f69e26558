"""The YAML of a recipe or a study: what JSON has, with aliases and `<<`."""

from __future__ import annotations

import re
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from thinwire.errors.names import did_you_mean
from thinwire.pipeline.errors import OptionsError

MOST_CHARACTERS = 200_000
_TAG = "tag:yaml.org,2002:"


def load_yaml(text: str, where: str) -> Any:
    """The value of a YAML text. OptionsError if it is not valid YAML, or longer than a recipe can be."""
    if len(text) > MOST_CHARACTERS:
        raise OptionsError(f"{where} must have at most {MOST_CHARACTERS} characters, got {len(text)}")
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise OptionsError(f"{where} must not be nested so deep") from None
    except (yaml.YAMLError, ValueError) as error:
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
            return file.read(MOST_CHARACTERS + 1)  # a file has no end, or claims to be larger than any memory
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
    """A safe loader of what JSON has, for which a field may stand only once.

    YAML's own takes the last of equal fields without a word. It reads 010 as 8, 1:30 as 90, 2026-01-31 as a date and
    off as false: here they are text.
    """

    yaml_constructors = {
        tag: made
        for tag, made in yaml.SafeLoader.yaml_constructors.items()
        if tag not in {f"{_TAG}{kind}" for kind in ("binary", "omap", "pairs", "set", "timestamp")}
    }
    yaml_implicit_resolvers = dict[str, list[Any]]()

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.deep_construct = True  # a value that is part of itself is refused, not made later

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """The node of a mapping, before what it merges is added to it."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        names = set[str]()
        for key, _ in node.value:
            if (name := str(key.value)) in names:
                raise ComposerError(None, None, f"{name} must stand only once", key.start_mark)
            names.add(name)
        return node

    def construct_scalar(self, node: Any) -> Any:
        """The text of a number, a word or a text."""
        text = super().construct_scalar(node)
        if "\0" in text:  # no path may hold it, and Python raises a ValueError of its own for each
            raise ConstructorError(None, None, "text must not hold the character NUL", node.start_mark)
        return text

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put what `<<` merges in its place: own fields count before merged ones, earlier groups before later ones.

        PyYAML 6.0.4 takes now the first, now the last.
        """
        own, merged = dict[str, tuple[yaml.Node, yaml.Node]](), dict[str, tuple[yaml.Node, yaml.Node]]()
        for key, value in node.value:
            if key.tag != f"{_TAG}merge":
                own[str(key.value)] = key, value
                continue
            for group in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if not isinstance(group, yaml.MappingNode):
                    raise ComposerError(None, None, "<< must be followed by groups of fields", group.start_mark)
                self.flatten_mapping(group)
                for pair in group.value:
                    merged.setdefault(str(pair[0].value), pair)
        node.value = [*(merged | own).values()]


for _kind, _pattern in {
    "null": r"(?i:null|~|)",
    "bool": r"(?i:yes|no|true|false)",
    "int": r"[-+]?(0|[1-9][0-9_]{0,999}|0x[0-9a-fA-F]{1,999})",
    "float": r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|(?i:\.inf))|(?i:\.nan)",
    "merge": r"<<",
}.items():
    _Loader.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(rf"(?:{_pattern})\Z"), None)


class _Dumper(yaml.SafeDumper):
    """Writes text in quotes where the loader would read something else."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
