"""The fields of a recipe by dotted name, such as `training.steps`: of the class, and of a recipe's values.

Which fields change nothing in a run's numbers, and what a misspelt option means: `--lr` means `--optimizer.lr`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any, get_type_hints

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


def unknown_options(text: str, known: Sequence[str]) -> str | None:
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
