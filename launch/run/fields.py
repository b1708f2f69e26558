"""The fields of a recipe by dotted name, such as `training.steps`: of the class, and of a recipe's values.

Which fields change nothing in a run's numbers, what is wrong with a value, and what a misspelt option means: `--lr`
means `--optimizer.lr`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from thinwire.errors.names import did_you_mean

UNRECOGNIZED = "unrecognized arguments: "
"""The start of argparse's message about unknown options."""

WITHOUT_EFFECT = (
    "name",
    "description",
    "output",
    "save_every",
    "wait_for_space",
    "rotate_logs",
    "checkpoint.",
    "wire.",
    "debug.",
    "training.recompute",
    "compression.store_folder",
    "data.outline",
    "replicas.meeting",
)
"""Fields that change nothing in a run's numbers. A name with a dot at the end is a whole group."""


def names_of(group: type[Any], prefix: str = "") -> Iterator[str]:
    """The names of all fields of a dataclass and of the dataclasses in it, as options spell them."""
    for name, kind in get_type_hints(group).items():
        if is_dataclass(kind) and isinstance(kind, type):
            yield from names_of(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


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


def sentence(text: str, prog: str, recipe: type[Any]) -> str:
    """A message of jsonargparse about an option of a recipe, in plainer words.

    Args:
        text: the message, as one line.
        prog: the command.
        recipe: the dataclass.
    """
    if unknown := _unknown_options(text, tuple(names_of(recipe))):
        return f"{unknown}; see {prog} --help"
    if group := re.match(r'Parser key "(\w+)": Unable to load config (\S+)', text):
        first = next(name for name in names_of(recipe) if name.startswith(f"{group[1]}."))
        return (
            f"--{group[1]} must be followed by a dot and a field, such as --{first}, got {group[2]}; see {prog} --help"
        )
    if run := re.match(r"unrecognized arguments: (\S+)/recipe\.yaml", text):
        return f"RECIPE must be left out beside --resume {run[1]}, which takes that of the run; see {prog} --help"
    within = re.match(r'Parser key "([\w.]+)": Problem with given class_path \S+ (.*)', text)
    if within and (told := _within(within[2], _inside(recipe, within[1]))):
        return f"{within[1]}: {told}"
    misfit = re.fullmatch(r'Parser key "([\w.]+)": .*Expected an? .*(?:Got|Given) value: (.*)', text)
    if misfit is None:
        text = re.sub(r'Parser key "([\w.]+)": (?:Problem with given class_path \S+ )?', r"\1: ", text)
        return f"{text}; see {prog} --help"
    kind: Any = recipe
    for name in misfit[1].split("."):
        kind = get_type_hints(kind)[name]
    if beneath := re.match(r"NestedArg\(key='([\w.]+)'", misfit[2]):
        return f"there is no field {misfit[1]}.{beneath[1]}: {misfit[1]} must be {_words(kind)}, and has no fields"
    got = misfit[2] if len(misfit[2]) <= 200 else f"{misfit[2][:200]}..."
    hint = did_you_mean(got.strip("'\""), get_args(kind)) if get_origin(kind) is Literal else ""
    if got.startswith(("{", "[")) and got.count(got[0]) != got.count(_CLOSING[got[0]]):
        hint = f"; a {_CLOSING[got[0]]} is missing"
    return f"{misfit[1]} must be {_words(kind)}, got {got}{hint}"


def _within(text: str, group: type[Any]) -> str | None:
    """What is wrong in a group of fields by number, of this class; None if the text says something else."""
    if option := re.match(r"(?:Group '(\w+)' does not accept option|Option) '(\w+)'", text):
        known = get_type_hints(get_type_hints(group)[option[1]] if option[1] else group)
        whose = f"{option[1]} has" if option[1] else "there is"
        return f"{whose} no field {option[2]}{did_you_mean(option[2], known)}; known: {', '.join(known)}"
    if value := re.match(r'Parser key "(\w+)": Unable to load config (\S+)', text):
        first = next(iter(get_type_hints(get_type_hints(group)[value[1]])))
        return f"{value[1]} must hold fields, such as {first}, got {value[2]}"
    return None


_CLOSING = {"{": "}", "[": "]"}


def _inside(recipe: type[Any], field: str) -> type[Any]:
    """The class of the values of a field of a recipe that holds groups of fields by number."""
    kind: Any = recipe
    for name in field.split("."):
        kind = get_type_hints(kind)[name]
    found: type[Any] = get_args(kind)[1]
    return found


def _words(kind: Any) -> str:
    """The type of a field, in words."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if isinstance(kind, UnionType):
        return " or ".join(map(_words, get_args(kind)))
    if get_origin(kind) is dict and get_args(kind)[0] is str:
        return "fields with values, such as {name: 4}"
    if get_origin(kind) is dict:
        return "groups of fields by number, with values of the right kinds"
    if get_origin(kind) is list:
        return "a list, such as [a, b]"
    said = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
    return said.get(kind, str(kind))


def _unknown_options(text: str, known: Sequence[str]) -> str | None:
    """A sentence about each unknown option, with a suggestion; None if the text names no option."""
    given = [word.partition("=")[0] for word in text.removeprefix(UNRECOGNIZED).split() if word.startswith("--")]
    if not text.startswith(UNRECOGNIZED) or not given:
        return None
    return "; ".join(f"there is no option {option}{_meant(option.removeprefix('--'), known)}" for option in given)


def _meant(name: str, known: Sequence[str]) -> str:
    """A suggestion in words: fields of this name in any group, else fields that contain it, else similar fields.

    Of fields of this name, those in groups within groups are named only if there are no others.
    """
    last = {field: field.rpartition(".")[2] for field in known}
    word = name.replace("-", "_")
    tried = (
        [field for field, end in last.items() if end == word and field.count(".") < 2],
        [field for field, end in last.items() if end == word],
        [field for field, end in last.items() if word in end],
        get_close_matches(word, known, n=1),
        [field for field, end in last.items() if end in get_close_matches(word, last.values(), n=1)],
    )
    fields = next(filter(None, tried), [])
    return f" (did you mean {' or '.join(f'--{field}' for field in fields)}?)" if fields else ""
