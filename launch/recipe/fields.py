"""The fields of dataclasses, such as those of a recipe or a study: their dotted names, and their values from YAML.

pydantic checks the types of all fields and makes the instances. What does not fit is a sentence each, and all are found
at once: types, and the checks of the dataclasses themselves.
"""

from __future__ import annotations

import ast
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeGuard, Union, get_args, get_origin

from thinwire.errors import ThinwireError
from thinwire.errors.names import did_you_mean
from thinwire.launch.recipe.yaml_text import load_yaml
from thinwire.models.errors import ModelError
from thinwire.pipeline.errors import OptionsError

WITHOUT_EFFECT = (
    "name",
    "description",
    "output",
    "save_every",
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

_UNKNOWN = ("unexpected_keyword_argument", "invalid_key")
"""What pydantic calls a field that a group does not have."""

_CLOSING = {"{": "}", "[": "]"}

_OTHER_WORDS = {
    "learning_rate": "optimizer.lr",
    "max_steps": "training.steps",
    "num_train_epochs": "training.epochs",
    "batch_size": "pipeline.microbatch_size",
    "per_device_train_batch_size": "pipeline.microbatch_size",
    "gradient_accumulation_steps": "pipeline.accumulation",
}
"""Words of other programs for fields of a recipe."""


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


def read_fields(group: Any, values: Mapping[Any, Any], where: str = "", checked: bool = True) -> Any:
    """An instance of a dataclass, with those inside it, from values as YAML has them.

    Args:
        group: the dataclass.
        values: by field; numbers, truth values and text are not taken for each other.
        where: what begins each sentence.
        checked: whether the checks of the dataclasses run too, and not only those of types.

    Raises:
        OptionsError: a sentence for each value that does not fit, unknown field, missing field, and failed check.
    """
    from pydantic_core import ValidationError

    try:
        return _validator(group, checked).validate_python(values)
    except ValidationError as error:
        sentences = _sentences(group, values, error.errors(include_url=False))
        raise OptionsError([(where and f"{where}: ") + said for said in sentences]) from None


@cache
def _validator(group: Any, checked: bool) -> Any:
    """What makes instances of a dataclass from values."""
    from pydantic import TypeAdapter
    from pydantic_core import SchemaValidator

    return SchemaValidator(_strict(TypeAdapter(group).core_schema, checked))


def _strict(schema: Any, checked: bool) -> Any:
    """A schema of pydantic in which scalars are never turned into each other, and unknown fields are mistakes.

    A list may be a tuple, fields a dataclass and the name of an entry a number, which pydantic's strict mode refuses.
    """
    if isinstance(schema, list):
        return [_strict(each, checked) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _strict(each, checked) for key, each in schema.items()}
    kind = made.get("type")
    if kind in ("int", "float", "bool", "str"):
        made["strict"] = True
    elif kind == "dict":
        made["keys_schema"] = schema["keys_schema"] | {"strict": schema["keys_schema"]["type"] == "str"}
    elif kind == "dataclass-args":
        made["extra_behavior"] = "forbid"
    elif kind == "dataclass":
        made["post_init"] = checked and made.get("post_init", False)
    elif kind == "default" and is_group(made.get("default_factory")):
        # a group that is left out is made and checked with the others
        del made["default_factory"]
        made |= {"default": {}, "validate_default": True}
    return made


def _sentences(group: type[Any], values: Any, errors: Sequence[Any]) -> Iterator[str]:
    """A sentence for each error of pydantic, but inside entries that are misnamed; unknown fields come first."""
    unknown = [error["loc"] for error in errors if error["type"] in _UNKNOWN]
    for above in sorted({loc[:-1] for loc in unknown}, key=len):
        yield from _unknown(group, above, [loc[-1] for loc in unknown if loc[:-1] == above])
    misnamed = [error["loc"][:-1] for error in errors if error["loc"][-1:] == ("[key]",)]
    for error in errors:
        loc = error["loc"]
        if error["type"] == "value_error":
            yield from _own(group, loc, error["ctx"]["error"])
        elif error["type"] not in _UNKNOWN and (loc[-1] == "[key]" or not any(loc[: len(at)] == at for at in misnamed)):
            yield _sentence(group, values, loc, error["type"])


def _unknown(group: type[Any], above: tuple[Any, ...], names: Sequence[Any]) -> list[str]:
    """Sentences about names that a group of fields in another one does not have."""
    kind, prefix = group, "".join(f"{part}." for part in above)
    for part in above:
        kind = _inside(kind, part)
    hints, others = get_type_hints(_holding(kind)), tuple(names_of(group))
    known = ", ".join(prefix + name for name in hints)
    if len(names) > _MOST_UNKNOWN:
        return [f"{len(names)} fields are unknown, such as {prefix}{names[0]}; known: {known}"]
    below = f"; options of a recipe stand below {prefix}options" if "options" in hints else ""
    found = {name: _or(_of_name(str(name), others)) for name in names}
    return [
        f"there is no field {prefix}{name}{found[name] or did_you_mean(str(name), hints)}{below}; known: {known}"
        for name in names
    ]


def _own(group: type[Any], loc: tuple[Any, ...], error: Exception) -> Sequence[str]:
    """What a check of a dataclass says; what begins with a field of it, by the dotted name of that."""
    if not isinstance(error, ModelError):
        return error.mistakes if isinstance(error, ThinwireError) else [str(error)]
    part = loc[0]
    hints = get_type_hints(get_type_hints(group)[part])
    return [
        said if said.startswith(f"{part}.") else f"{part}{'.' if said.split()[0] in hints else ': '}{said}"
        for said in error.mistakes
    ]


def _sentence(group: type[Any], values: Any, loc: tuple[Any, ...], error: str) -> str:
    """A sentence about a value that does not fit, or is missing. What lies inside a union or a pair is no field."""
    kind: Any = group
    for index, part in enumerate(loc):
        name, inside = ".".join(map(str, loc[:index])), _inside(kind, part)
        if loc[index + 1 :] == ("[key]",):
            return f"{name} must be {words(kind)}, got {_cut(f'the name {part}')}"
        if inside is None:
            return _misfit(kind, values, name)
        if error.startswith("missing") and loc[index + 1 :] == ():
            return f"{'.'.join(map(str, loc))} is missing"
        kind, values = inside, values[part]
    return _misfit(kind, values, ".".join(map(str, loc)))


def _inside(kind: Any, part: Any) -> Any:
    """The type of a field of a group, of an entry or of an item; None if a type holds no such."""
    if is_group(group := _holding(kind)):
        return get_type_hints(group).get(part)
    return get_args(kind)[-1] if get_origin(kind) in (list, dict) else None


def _parsed(text: str) -> Any:
    """What a text means as YAML; the text itself if it is none."""
    try:
        return load_yaml(text, "") if text.strip() else text
    except OptionsError:
        return text


def meaning(kind: Any, text: str) -> Any:
    """The value that the text of an option has for a field: text where that is allowed, else what YAML reads there."""
    read, kinds = _parsed(text), get_args(kind) if _is_union(kind) else (kind,)
    if str not in kinds and get_origin(kind) is not Literal:
        return read
    return read if type(read) in {get_origin(one) or one for one in kinds} else text


def _misfit(kind: Any, value: Any, name: str) -> str:
    """A sentence about a value of another type."""
    if is_group(group := _holding(kind)):
        first = next(iter(get_type_hints(group)))
        return f"{name} must hold fields, such as {first}, got {value!r}{_why_not_yaml(value)}"
    kinds = get_args(kind) if _is_union(kind) else (kind,)
    got = str(value).replace("'", "") if isinstance(value, list) else str(value) or "nothing"
    hint = _why_not_yaml(value)
    if get_origin(kind) is Literal:
        hint = did_you_mean(got, get_args(kind))
    elif str in kinds and not isinstance(value, str | list | Mapping | None):
        hint = "; put it in quotes"  # YAML reads 123 and true as other things than text
    elif isinstance(value, str) and list[str] in kinds and not hint:
        hint = f"; write [{value}]"
    elif isinstance(value, str) and not isinstance(_parsed(value), str):
        hint = "; leave out the quotes"
    return f"{name} must be {words(kind)}, got {_cut(got)}{hint}"


def _cut(text: str) -> str:
    """The beginning of a text for a sentence."""
    return text if len(text) <= 200 else f"{text[:200]}..."


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
    beyond, found = None, list[tuple[Any, Any]]()
    for part in name.split("."):
        key: Any = part
        if get_origin(kind) is dict:
            key_kind, kind = get_args(kind)
            key, beyond = int(part) if key_kind is int and re.fullmatch("[0-9]{1,9}", part) else part, Any
        elif kind is not Any:
            kind = get_type_hints(kind).get(part, beyond) if is_group(kind) else None
        found.append((key, kind))
    return found


def put(values: Values, group: type[Any], name: str, given: Any) -> None:
    """Set a field in the values of a dataclass, by its dotted name, to a value or what the text of an option means.

    Groups on the way there are copied, because YAML may have one in two places.
    """
    steps = steps_to(group, name)
    kind = steps[-1][1]
    read = meaning(kind, given) if isinstance(given, str) else given
    if is_group(kind) and isinstance(read, dict):
        for inner in read:
            put(values, group, f"{name}.{inner}", read[inner])
        return
    for key, _ in steps[:-1]:
        inner = values.get(key)
        values[key] = dict(inner) if isinstance(inner, dict) else {}
        values = values[key]
    values[steps[-1][0]] = read


def meant(name: str, known: Collection[str]) -> str:
    """A suggestion in words: fields of this name in any group, else fields that contain it, else similar fields."""
    last = {field: field.rpartition(".")[2] for field in known}
    word = name.replace("-", "_") or "-"
    tried = (
        _of_name(word, known),
        [field for field, end in last.items() if word in end],
        # in the name of its group alone half of a word may agree
        [one for one in get_close_matches(word, known) if get_close_matches(word.split(".")[-1], [last[one]])][:1],
        [field for field, end in last.items() if end in get_close_matches(word, last.values(), n=1)],
    )
    return _or([f"--{field}" for field in next(filter(None, tried), [])])


def _of_name(name: str, known: Collection[str]) -> list[str]:
    """The fields of this name in any group; those in groups within groups only if there are no others."""
    other = _OTHER_WORDS.get(name.rpartition(".")[2])
    found = [field for field in known if field.rpartition(".")[2] == name or field == other]
    return [field for field in found if field.count(".") < 2] or found


def _or(fields: Collection[str]) -> str:
    return f" (did you mean {' or '.join(fields)}?)" if fields else ""
