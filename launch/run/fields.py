"""The fields of dataclasses, such as those of a recipe or a study: their dotted names, and their values from YAML.

`converted` walks the types of all fields once. What does not fit is a sentence each, and all are found at once.
"""

from __future__ import annotations

import ast
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeGuard, Union, get_args, get_origin

from thinwire.errors.names import did_you_mean
from thinwire.launch.run.yaml_text import load_yaml
from thinwire.pipeline.errors import OptionsError

WITHOUT_EFFECT = (
    "name",
    "description",
    "output",
    "save_every",
    "wait_for_space",
    "logging",
    "checkpoint.",
    "wire.",
    "debug.",
    "training.recompute",
    "compression.store_folder",
    "data.outline",
    "clients.outlines",
)
"""Fields of a recipe that change nothing in a run's numbers. A name with a dot at the end is a whole group."""

get_type_hints: Callable[[Any], dict[str, Any]] = cache(typing.get_type_hints)
"""They are evaluated from text, which took half of the time that it takes to read a recipe."""

Values = dict[Any, Any]
"""The values of a dataclass by field; those of dataclasses in it are such groups themselves."""

_MOST_UNKNOWN = 5
"""More unknown fields than this are one sentence: the file is about something else."""

_CLOSING = {"{": "}", "[": "]"}


def names_of(group: type[Any], prefix: str = "") -> Iterator[str]:
    """The names of all fields of a dataclass and of the dataclasses in it, as options spell them."""
    for name, kind in get_type_hints(group).items():
        if is_group(kind):
            yield from names_of(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def explained(group: type[Any], prefix: str = "") -> Iterator[tuple[str, str, Any, Any, str]]:
    """Each field of a dataclass and of those in it: its group's title, dotted name, type, default and sentence."""
    tree = ast.parse(Path(str(sys.modules[group.__module__].__file__)).read_text())
    [body] = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == group.__name__]
    said = {
        node.target.id: " ".join(str(below.value.value).split())
        for node, below in pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }
    hints = get_type_hints(group)
    for field in fields(group):
        if is_group(hints[field.name]):
            yield from explained(hints[field.name], f"{prefix}{field.name}.")
        else:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            title = str(group.__doc__).partition("\n")[0].rstrip(".")
            yield title, f"{prefix}{field.name}", hints[field.name], default, said.get(field.name, "")


def is_among(name: str, fields: Collection[str]) -> bool:
    """Whether a field is one of these, or in one of these groups."""
    return any(name.startswith(field) if field.endswith(".") else name == field for field in fields)


def values_of(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The fields of nested groups by dotted name. Values deeper than one group, such as `boundaries`, stay whole."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = value if isinstance(value, Mapping) and prefix == "" else None
        found |= {f"{prefix}{name}": value} if inner is None else values_of(inner, f"{name}.")
    return found


def is_group(kind: Any) -> TypeGuard[type[Any]]:
    """Whether a type is a dataclass."""
    return isinstance(kind, type) and is_dataclass(kind)


def read_fields(group: type[Any], values: Mapping[Any, Any], where: str) -> Any:
    """An instance of a dataclass. OptionsError with a sentence for each mistake; `where` begins all of them."""
    mistakes: list[str] = []
    read = converted(group, values, "", mistakes)
    if mistakes:
        raise OptionsError([f"{where}: {mistake}" for mistake in mistakes])
    return build(group, read)


def build(kind: Any, value: Any) -> Any:
    """The instances of dataclasses in values that `converted` gives; their own checks may raise."""
    if isinstance(value, list):
        return [build(get_args(kind)[0], one) for one in value] if get_origin(kind) is list else value
    if not isinstance(value, dict):
        return value
    group = _holding(kind)
    if is_group(group):
        hints = get_type_hints(group)
        return group(**{name: build(hints[name], one) for name, one in value.items()})
    return {key: build(get_args(group)[1], one) for key, one in value.items()} if get_args(group) else value


def converted(kind: Any, value: Any, name: str, mistakes: list[str], others: Collection[str] = ()) -> Any:
    """A value as its type says; a dataclass stays a group of values.

    Args:
        kind: the type of the field.
        value: from YAML, or the text of an option.
        name: the field's dotted name; empty for the outermost group.
        mistakes: gets a sentence for each value that does not fit, unknown field, and missing one.
        others: the fields of all groups, which an unknown one may be; those of the outermost group if left out.
    """
    if kind is Any:
        return value
    origin, inside = get_origin(kind), get_args(kind)
    if _is_union(kind) and not (isinstance(value, Mapping) and is_group(_holding(kind))):
        for part in sorted(inside, key=lambda part: part is not NoneType):
            wrong: list[str] = []
            fits = converted(part, value, name, wrong)
            if not wrong:
                return fits
        mistakes.append(_misfit(kind, value, name))
        return value
    read = _parsed(value) if isinstance(value, str) and kind is not str and origin is not Literal else value
    if is_group(group := _holding(kind)):
        return _group(group, read, name, mistakes, others or tuple(names_of(group)))
    if origin is list and isinstance(read, list):
        return [converted(inside[0], one, f"{name}.{index}", mistakes) for index, one in enumerate(read)]
    if origin is tuple and isinstance(read, list | tuple) and len(read) == len(inside):
        return tuple(
            converted(part, one, f"{name}.{index}", mistakes)
            for index, (part, one) in enumerate(zip(inside, read, strict=True))
        )
    if origin is dict and isinstance(read, Mapping):
        keys = [_key(kind, key, name, mistakes) for key in read]
        return {
            key: converted(inside[1], one, f"{name}.{key}", mistakes)
            for key, one in zip(keys, read.values(), strict=True)
        }
    if origin is Literal:
        read = {True: "on", False: "off"}.get(read, read) if isinstance(read, bool) else read  # YAML's own words
        if read in inside:
            return read
    if kind is float and type(read) is int and abs(read) < 1e300:
        return float(read)
    if origin is not None or type(read) is not kind:
        mistakes.append(_misfit(kind, value, name))
    return read


def _group(group: type[Any], values: Any, name: str, mistakes: list[str], others: Collection[str]) -> Any:
    """The values of a dataclass."""
    hints, prefix = get_type_hints(group), f"{name}." if name else ""
    if not isinstance(values, Mapping):
        mistakes.append(f"{name} must hold fields, such as {next(iter(hints))}, got {values!r}{_why_not_yaml(values)}")
        return values
    unknown, known = [given for given in values if given not in hints], ", ".join(prefix + known for known in hints)
    if len(unknown) > _MOST_UNKNOWN:
        mistakes.append(f"{len(unknown)} fields are unknown, such as {prefix}{unknown[0]}; known: {known}")
        return values
    below = f"; options of a recipe stand below {prefix}options" if "options" in hints else ""
    for given in unknown:
        hint = _or(_of_name(str(given), others)) or did_you_mean(str(given), hints)
        mistakes.append(f"there is no field {prefix}{given}{hint}{below}; known: {known}")
    for field in fields(group):
        if field.name not in values and field.default is MISSING and field.default_factory is MISSING:
            mistakes.append(f"{prefix}{field.name} is missing")
    return {
        given: converted(hints[given], value, f"{prefix}{given}", mistakes, others)
        for given, value in values.items()
        if given in hints
    }


def _key(kind: Any, key: Any, name: str, mistakes: list[str]) -> Any:
    """A key of a dict as its type says."""
    wrong: list[str] = []
    read = converted(get_args(kind)[0], key, name, wrong)
    if wrong:
        mistakes.append(_misfit(kind, f"the name {key}", name))
    return read


def _parsed(text: str) -> Any:
    """What a text means as YAML; the text itself if it is none."""
    try:
        return load_yaml(text, "") if text.strip() else text
    except OptionsError:
        return text


def _misfit(kind: Any, value: Any, name: str) -> str:
    """A sentence about a value of another type."""
    got = str(value) or "nothing"
    hint = did_you_mean(got, get_args(kind)) if get_origin(kind) is Literal else _why_not_yaml(value)
    if str in (get_args(kind) if _is_union(kind) else [kind]) and not isinstance(value, str | list | Mapping | None):
        hint = "; put it in quotes"  # YAML reads 123 and true as other things than text
    return f"{name} must be {words(kind)}, got {got if len(got) <= 200 else f'{got[:200]}...'}{hint}"


def _why_not_yaml(value: Any) -> str:
    """Why a text in braces or brackets is not what it looks like, to follow a sentence; empty for other values."""
    if not isinstance(value, str) or (closing := _CLOSING.get(value[:1])) is None:
        return ""
    if value.count(value[0]) != value.count(closing):
        return f"; a {closing} is missing"
    try:
        load_yaml(value, "it")
    except OptionsError as error:
        return f"; {error}"
    return ""


def words(kind: Any) -> str:
    """A type as people say it."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(inside)}"
    if _is_union(kind):
        parts = [words(part) for part in inside]
        return (", or " if "," in "".join(parts) else " or ").join(parts)
    if origin is dict and is_group(inside[1]) and inside[0] is int:
        return f"groups of fields by number, such as {{1: {{{next(iter(get_type_hints(inside[1])))}: ...}}}}"
    if origin is dict:
        return "fields with values, such as {name: 4}"
    if origin is list:
        lists = {int: "a list of numbers, such as [1, 2]", str: "a list of words, such as [a, b]"}
        return lists.get(int if inside[0] is float else inside[0], "a list")
    if origin is tuple:
        return f"a list of {len(inside)} numbers"
    said = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
    return said.get(kind, "a group of fields")


def _holding(kind: Any) -> Any:
    """The type that holds fields, of one that may be null too; any other type as it is."""
    return next((part for part in get_args(kind) if is_group(part)), kind) if _is_union(kind) else kind


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def steps_to(group: type[Any], name: str) -> list[tuple[Any, Any]]:
    """The keys that lead to a field by its dotted name, each with the type of what it holds; None where there is none.

    Behind a dict any field may stand, because which there are is only known with the values.
    """
    kind: Any = group
    found, behind = list[tuple[Any, Any]](), False
    for part in name.split("."):
        key: Any = part
        if is_group(kind):
            kind = get_type_hints(kind).get(part, Any if behind else None)
        elif (mapping := _mapping(kind)) is not None:
            key_kind, kind = get_args(mapping)
            key, behind = int(part) if key_kind is int and re.fullmatch("[0-9]{1,9}", part) else part, True
        elif kind is not Any:
            kind = None
        found.append((key, kind))
    return found


def _mapping(kind: Any) -> Any:
    """The dict that a type is, or may be; None if it is none."""
    return next((part for part in (kind, *get_args(kind)) if get_origin(part) is dict), None)


def put(values: Values, group: type[Any], name: str, given: Any) -> None:
    """Set a field of a dataclass's values by its dotted name to what an option gives; fields of a group in braces."""
    steps = steps_to(group, name)
    kind = steps[-1][1]
    read = given
    if isinstance(given, str) and (kind is Any or is_group(kind) or (_mapping(kind) and given.startswith("{"))):
        read = _parsed(given)
    if is_group(kind) and isinstance(read, dict):
        for inner, value in read.items():
            put(values, group, f"{name}.{inner}", value)
        return
    for key, _ in steps[:-1]:
        if not isinstance(values.get(key), dict):
            values[key] = {}
        values = values[key]
    values[steps[-1][0]] = read


def meant(name: str, known: Collection[str]) -> str:
    """A suggestion in words: fields of this name in any group, else fields that contain it, else similar fields."""
    last = {field: field.rpartition(".")[2] for field in known}
    word = name.replace("-", "_") or "-"
    tried = (
        _of_name(word, known),
        [field for field, end in last.items() if word in end],
        get_close_matches(word, known, n=1),
        [field for field, end in last.items() if end in get_close_matches(word, last.values(), n=1)],
    )
    return _or([f"--{field}" for field in next(filter(None, tried), [])])


def _of_name(name: str, known: Collection[str]) -> list[str]:
    """The fields of this name in any group; those in groups within groups only if there are no others."""
    found = [field for field in known if field.rpartition(".")[2] == name]
    return [field for field in found if field.count(".") < 2] or found


def _or(fields: Collection[str]) -> str:
    return f" (did you mean {' or '.join(fields)}?)" if fields else ""
