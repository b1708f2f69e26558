"""Dataclasses from the values of a YAML file; every field that is unknown, missing or ill-typed is reported at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from thinwire.errors.names import did_you_mean
from thinwire.pipeline.errors import OptionsError

_WORDS = {str: "text", int: "a whole number", float: "a number", type(None): "null"}

_MOST_UNKNOWN = 5
"""More unknown fields than this are reported in one sentence: the file is not a study."""


def read_fields(kind: type[Any], values: Mapping[Any, Any], where: str) -> Any:
    """An instance of a dataclass. OptionsError with a sentence for each mistake; `where` begins all of them."""
    mistakes: list[str] = []
    built = _dataclass(kind, values, "", mistakes)
    if mistakes:
        raise OptionsError([f"{where}: {mistake}" for mistake in mistakes])
    return built


def _dataclass(kind: type[Any], values: Any, name: str, mistakes: list[str]) -> Any:
    """An instance of a dataclass; None where there was a mistake."""
    hints, before = get_type_hints(kind), len(mistakes)
    prefix = f"{name}." if name else ""
    if not isinstance(values, Mapping):
        mistakes.append(f"{name} must hold fields, such as {next(iter(hints))}, got {values!r}")
        return None
    unknown, known = [given for given in values if given not in hints], ", ".join(prefix + known for known in hints)
    if len(unknown) > _MOST_UNKNOWN:
        mistakes.append(f"{len(unknown)} fields are unknown, such as {prefix}{unknown[0]}; known: {known}")
        return None
    below = f"; options of a recipe stand below {prefix}options" if "options" in hints else ""
    for given in unknown:
        mistakes.append(f"there is no field {prefix}{given}{did_you_mean(str(given), hints)}{below}; known: {known}")
    for field in fields(kind):
        if field.name not in values and field.default is MISSING and field.default_factory is MISSING:
            mistakes.append(f"{prefix}{field.name} is missing")
    found = {
        given: _value(hints[given], value, f"{prefix}{given}", mistakes)
        for given, value in values.items()
        if given in hints
    }
    return kind(**found) if len(mistakes) == before else None


def _value(kind: Any, value: Any, name: str, mistakes: list[str]) -> Any:
    """The value as its type; a mistake is noted, and the value given back as it is."""
    origin, inside = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind, value, name, mistakes)
    if _is_union(kind) and isinstance(value, Mapping):
        for part in inside:
            if isinstance(part, type) and is_dataclass(part):
                return _dataclass(part, value, name, mistakes)
    if origin is list and isinstance(value, list):
        return [_value(inside[0], one, f"{name}.{index}", mistakes) for index, one in enumerate(value)]
    if origin is dict and isinstance(value, Mapping):
        keys = [_value(inside[0], key, name, mistakes) for key in value]
        return {
            key: _value(inside[1], one, f"{name}.{key}", mistakes)
            for key, one in zip(keys, value.values(), strict=True)
        }
    if origin is Literal:
        value = {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value  # YAML's own words
    if kind is float and type(value) is int:
        value = float(value)
    if not _fits(kind, value):
        mistakes.append(f"{name} must be {_words(kind)}, got {value!r}")
    return value


def _is_union(kind: Any) -> bool:
    """Whether a type is one of several; a Literal makes another kind of union than a class."""
    return get_origin(kind) in (UnionType, Union)


def _fits(kind: Any, value: Any) -> bool:
    if kind is Any:
        return True
    if _is_union(kind):
        return any(_fits(part, value) for part in get_args(kind)) or (float in get_args(kind) and type(value) is int)
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    return get_origin(kind) is None and type(value) is kind


def _words(kind: Any) -> str:
    """A type as people say it."""
    if _is_union(kind):
        return " or ".join(map(_words, get_args(kind)))
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if is_dataclass(kind):
        return "a group of fields"
    return {list: "a list", dict: "a group of fields"}.get(get_origin(kind), _WORDS.get(kind, str(kind)))
