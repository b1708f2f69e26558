"""The one exception of `thinwire.models`, and the ways several mistakes become one message."""

from collections.abc import Callable
from typing import Any


class ModelError(ValueError):
    """A model, its cut, its data or its options cannot work; the message says the rule, the value and the way out."""


def require(*rules: tuple[bool, str]) -> None:
    """Raise one `ModelError` with the sentence of every rule that does not hold; each rule is (holds, sentence)."""
    broken = [sentence for holds, sentence in rules if not holds]
    if broken:
        raise ModelError("; ".join(broken))


def attempt(*parts: Callable[[], Any]) -> list[Any]:
    """Return what each part returns; where some raise `ModelError`, raise one with the sentences of them all."""
    results, mistakes = [], []
    for part in parts:
        try:
            results.append(part())
        except ModelError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ModelError("; ".join(dict.fromkeys(mistakes)))
    return results
