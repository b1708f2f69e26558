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
from typing import Any, Literal, TypeGuard, get_args, get_origin, get_type_hints

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
        if _is_group(kind):
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


def misfits(given: Mapping[Any, Any], group: type[Any], prefix: str = "") -> list[str]:
    """One sentence for each unknown field, and for each value that stands where a group of fields is needed."""
    kinds = get_type_hints(group)
    mistakes = []
    for name, value in given.items():
        if name in kinds:
            mistakes += _misfit(value, kinds[name], f"{prefix}{name}")
        else:
            known = ", ".join(prefix + known for known in kinds)
            mistakes.append(f"there is no field {prefix}{name}{did_you_mean(str(name), kinds)}; known: {known}")
    return mistakes


def _misfit(value: Any, kind: Any, name: str) -> list[str]:
    if (each := _by_number(kind)) and isinstance(value, dict):
        return [mistake for number, inner in value.items() for mistake in _misfit(inner, each, f"{name}.{number}")]
    if not _is_group(kind):
        return []
    if isinstance(value, dict):
        return misfits(value, kind, f"{name}.")
    return [f"{name} must {_hold(kind)}, got {value!r}"]


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
    plain = re.sub(_KEY, r"\1: ", text)
    return _of_field(text, recipe) or f"{plain}; see {prog} --help"


_KEY = r'Parser key "([\w.]+)": '


def _of_field(text: str, group: type[Any]) -> str | None:
    """What is wrong with the value of a field of a group; None if the text says something else."""
    if not (key := re.match(_KEY, text)):
        return None
    name, told, kind = key[1], text[key.end() :], _kind(group, key[1])
    if each := _by_number(kind):
        return f"{name}{_of_groups(told, each)}"
    if config := re.match(rf'Unable to load config (\S+)(?:.* - (Parser key "{name}\..*))?', told):
        return _of_field(config[2], group) if config[2] else f"{name} must {_hold(kind)}, got {config[1]}"
    misfit = re.fullmatch(r".*Expected an? .*(?:Got|Given) value: ?(.*)", told)
    if misfit is None:
        return None
    if beneath := re.match(r"NestedArg\(key='([\w.]+)'", misfit[1]):
        return f"there is no field {name}.{beneath[1]}: {name} must be {_words(kind)}, and has no fields"
    got = misfit[1] if len(misfit[1]) <= 200 else f"{misfit[1][:200]}..."
    hint = did_you_mean(got.strip("'\""), get_args(kind)) if get_origin(kind) is Literal else ""
    if got.startswith(("{", "[")) and got.count(got[0]) != got.count(_CLOSING[got[0]]):
        hint = f"; a {_CLOSING[got[0]]} is missing"
    return f"{name} must be {_words(kind)}, got {got or 'nothing'}{hint}"


_CLOSING = {"{": "}", "[": "]"}


def _of_groups(told: str, each: type[Any]) -> str:
    """What is wrong in groups by number, each of a class: the end of a sentence that begins with their field."""
    within = re.sub(r"^Problem with given class_path \S+ ", "", told)
    if option := re.match(r"(?:Group '(\w+)' does not accept option|Option) '(\w+)'", within):
        known = get_type_hints(_kind(each, option[1]) if option[1] else each)
        whose = f"{option[1]} has" if option[1] else "there is"
        return f": {whose} no field {option[2]}{did_you_mean(option[2], known)}; known: {', '.join(known)}"
    if inner := _of_field(within, each):
        return f": {inner}"
    got = re.search(r"(?:value|string|base 10): (?!Namespace)([\w'.+-]+)", told)
    first = next(iter(get_type_hints(each)))
    return f" must be groups of fields by number, such as {{1: {{{first}: ...}}}}{f', got {got[1]}' if got else ''}"


def _kind(group: type[Any], field: str) -> Any:
    """The type of a field by its dotted name."""
    kind: Any = group
    for name in field.split("."):
        kind = get_type_hints(kind)[name]
    return kind


def _by_number(kind: Any) -> type[Any] | None:
    """The class of the groups, if a field holds groups of fields by number."""
    values = get_args(kind)[1:] if get_origin(kind) is dict else ()
    return values[0] if values and _is_group(values[0]) else None


def _is_group(kind: Any) -> TypeGuard[type[Any]]:
    return isinstance(kind, type) and is_dataclass(kind)


def _hold(group: type[Any]) -> str:
    """What a group must do, in words."""
    return f"hold fields, such as {next(iter(get_type_hints(group)))}"


def _words(kind: Any) -> str:
    """The type of a field, in words."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if isinstance(kind, UnionType):
        words = [_words(choice) for choice in get_args(kind)]
        return (", or " if "," in "".join(words) else " or ").join(words)
    if get_origin(kind) is dict:
        return "fields with values, such as {name: 4}"
    if get_origin(kind) is list:
        numbers = get_args(kind) in ((int,), (float,))
        return "a list of numbers, such as [1, 2]" if numbers else "a list of words, such as [a, b]"
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} numbers"
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
