"""Suggestions for unknown options: `--lr` means `--optimizer.lr`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any, get_type_hints

UNRECOGNIZED = "unrecognized arguments: "
"""The start of argparse's message about unknown options."""


def dotted(group: type[Any], prefix: str = "") -> Iterator[str]:
    """The names of all fields of a dataclass and of the dataclasses in it, as options spell them."""
    for name, kind in get_type_hints(group).items():
        if is_dataclass(kind) and isinstance(kind, type):
            yield from dotted(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def unknown_options(text: str, known: Sequence[str]) -> str | None:
    """A sentence about each unknown option, with a suggestion; None if the text names no option."""
    given = [word.partition("=")[0] for word in text.removeprefix(UNRECOGNIZED).split() if word.startswith("--")]
    if not text.startswith(UNRECOGNIZED) or not given:
        return None
    return "; ".join(f"there is no option {option}{_meant(option.removeprefix('--'), known)}" for option in given)


def _meant(name: str, known: Sequence[str]) -> str:
    """A suggestion in words: fields of this name in any group, else fields that contain it, else similar fields."""
    last = {field: field.rpartition(".")[2] for field in known}
    word = name.replace("-", "_")
    tried = (
        [field for field, end in last.items() if end == word],
        [field for field, end in last.items() if word in end],
        get_close_matches(word, known, n=1),
        [field for field, end in last.items() if end in get_close_matches(word, last.values(), n=1)],
    )
    fields = next(filter(None, tried), [])
    return f" (did you mean {' or '.join(f'--{field}' for field in fields)}?)" if fields else ""
