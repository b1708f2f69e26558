"""The parser for the options of a command itself, without those of a recipe. A wrong value gives one sentence."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from thinwire.pipeline.errors import OptionsError


class Parser(argparse.ArgumentParser):
    """A parser that raises OptionsError. The parser of argparse prints its usage and exits."""

    def __init__(self, **kwargs: Any) -> None:
        # no abbreviations: one might be an option of the recipe, or of a later release
        super().__init__(allow_abbrev=False, **kwargs)
        self.register("type", int, partial(_read, int, "a whole number"))
        self.register("type", float, partial(_read, float, "a number"))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does; its options have underscores as well as dashes, and paths ~/, as those of a recipe."""
        return super().parse_known_args([self._own(word) for word in args or ()], namespace)

    def _own(self, word: str) -> str:
        """A word; an option of this parser with its dashes."""
        option, equals, text = word.partition("=")
        dashed = option.replace("_", "-")
        return dashed + equals + at_home(text) if dashed in self._option_string_actions else at_home(word)

    def error(self, message: str) -> NoReturn:
        """Raise OptionsError instead of exiting."""
        raise OptionsError(f"{message}; see {self.prog} --help")


def at_home(text: str) -> str:
    """A text; a path that begins with ~/ begins with the user's home, wherever a shell leaves it as it is."""
    return str(Path(text).expanduser()) if text.startswith("~/") else text


def run_folder(place: Path) -> Path:
    """A folder that an argument RUN names. OptionsError if it is none."""
    if not place.is_dir():
        what = "is no folder" if place.exists() else "does not exist"
        raise OptionsError(f"RUN must be the folder of a run, got {place}, which {what}")
    return place


def new_folder(place: Path) -> Path:
    """A new or empty folder that --to names; nothing is made. OptionsError if it holds something, or cannot be made."""
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        what = "which is not empty" if place.is_dir() else "a file"
        raise OptionsError(f"--to must name a new or empty folder, got {place}, {what}")
    above = next(path for path in (place, *place.absolute().parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise OptionsError(f"--to must name a folder that can be written, got {place}: {above} cannot")
    return place


@contextmanager
def written(option: str, path: Path, what: str = "file") -> Iterator[None]:
    """Around code that writes what an option names. OptionsError if that cannot be, or a file is not one of ours."""
    try:
        yield
    except OSError as error:
        raise OptionsError(
            f"{option} must name a {what} that can be written, got {path}: {error.strerror or error}"
        ) from error


def at_least_one(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _checked(fits: Callable[[float], bool], words: str, text: str) -> float:
    """The finite number that a text is, if it fits."""
    with suppress(ValueError):
        if math.isfinite(value := float(text)) and fits(value):
            return value
    raise argparse.ArgumentTypeError(f"must be {words}, got {text!r}")


positive = partial(_checked, lambda value: value > 0, "a number above 0")
not_negative = partial(_checked, lambda value: value >= 0, "a number of at least 0")
share = partial(_checked, lambda value: 0 < value <= 1, "above 0 and at most 1")
"""Types of options: finite numbers within bounds."""


def _read(kind: Callable[[str], Any], words: str, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {words}, got {text!r}") from None
