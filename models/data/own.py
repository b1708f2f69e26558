"""Data that a function of your own gives: `module:function`, which takes a split."""

from __future__ import annotations

from typing import TypeVar

from thinwire.errors.imports import find
from thinwire.models.data.parts import MAIN_SPLIT, Columns, Labelled, Part
from thinwire.models.errors import ModelError, require

T = TypeVar("T")


def read_own_texts(part: Part, columns: Columns) -> list[str]:
    """The texts that the function returns."""
    return _read(part, list, "a list of texts")


def read_own_examples(part: Part, columns: Columns) -> Labelled:
    """The examples that the function returns."""
    return _read(part, Labelled, "Labelled examples")


def _read(part: Part, returned: type[T], meaning: str) -> T:
    """What the function gives for a split.

    Raises:
        ModelError: if there is no such function, it fails, or it gives something else.
    """
    read = find(part.name, ModelError)
    if not callable(read):
        raise ModelError(f"{part.name} must be a function that takes a split, got {type(read).__name__}")
    split = part.split or MAIN_SPLIT
    try:
        given = read(split)
    except Exception as error:
        raise ModelError(f"{part.name} failed for the split {split!r}: {type(error).__name__}: {error}") from error
    require((isinstance(given, returned), f"{part.name} must return {meaning}, got {type(given).__name__}"))
    examples: T = given
    return examples
