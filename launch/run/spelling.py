"""The option that was meant by one that there is not: `--lr` is `--optimizer.lr`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any, get_type_hints

UNRECOGNIZED = "unrecognized arguments: "
"""How argparse begins what it says of options that it does not know."""


def dotted(group: type[Any], prefix: str = "") -> Iterator[str]:
    """The names of all fields of a dataclass and of the dataclasses in it, as options spell them."""
    for name, kind in get_type_hints(group).items():
        if is_dataclass(kind) and isinstance(kind, type):
            yield from dotted(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def unknown_options(text: str, known: Sequence[str]) -> str | None:
    """A sentence for the options that argparse did not know, each with what was meant; None where it names none."""
    given = [word.partition("=")[0] for word in text.removeprefix(UNRECOGNIZED).split() if word.startswith("--")]
    if not text.startswith(UNRECOGNIZED) or not given:
        return None
    return "; ".join(f"there is no option {option}{_meant(option.removeprefix('--'), known)}" for option in given)


def _meant(name: str, known: Sequence[str]) -> str:
    """In words, the fields of this name wherever they are; else those whose names hold it, else those like it."""
    last = {field: field.rpartition(".")[2] for field in known}
    word = name.replace("-", "_")
    tried = (
        [field for field, end in last.items() if end == word],
        [field for field, end in last.items() if word in end],
        get_close_matches(word, known, n=1),
        [field for field, end in last.items() if end in get_close_matches(word, last.values(), n=1)],
    )
    fields = next(filter(None, tried), [])
    return f" (meant {' or '.join(f'--{field}' for field in fields)}?)" if fields else ""
