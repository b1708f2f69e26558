"""The errors that a user can cause, as one family: each holds sentences for the user, so no traceback is needed.

ThinwireError             thinwire.errors
├── CodecError            thinwire.compress    a wrong codec expression, or a wrong use of a codec
│   └── ContractError     a codec of your own that breaks a rule of codecs
├── StoreError            thinwire.compress    a store cannot keep or give a row
├── ModelError            thinwire.models      a model, its cut, its data or its options are wrong
├── PipelineError         thinwire.pipeline
│   ├── OptionsError      options that cannot work
│   ├── MismatchError     the two ends of a boundary were started differently
│   ├── WireError         a frame that is not the planned one
│   ├── PeerError         a stage that is gone, or silent beyond the time-out
│   ├── MemoryFullError   a stage that needs more memory than its device has
│   ├── CheckpointError   a checkpoint that cannot be written, read or resumed
│   ├── NonFiniteError    NaN or infinity in a tensor about to be sent
│   └── EvaluationStoppedError  an evaluation that a process was asked to stop
├── FailedError           thinwire.launch      work that began and failed
│   └── OutputError       what a run has to write cannot be written
└── StoppedError          thinwire.launch      work that its user stopped

Each class is in the room that raises it. The root is below all rooms, so a caller needs one `except`, and mistakes of
different rooms are gathered in one way. What goes on all the same is a ThinwireWarning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar


class ThinwireError(Exception):
    """One mistake, or several at once, each as a sentence for the user; the message has them all."""

    separator: ClassVar[str] = "\n"
    """The text between two mistakes in the message."""
    mistakes: tuple[str, ...]
    """Each mistake once: the rule, the value, what to change."""

    def __init__(self, mistakes: str | Iterable[str] = ()) -> None:
        each = (mistakes,) if isinstance(mistakes, str) else mistakes
        # the bytes of a path may be no UTF-8, which nothing could print
        self.mistakes = tuple(dict.fromkeys(said.encode(errors="backslashreplace").decode() for said in each))
        super().__init__(self.separator.join(self.mistakes))

    @classmethod
    def require(cls, *rules: tuple[bool, str]) -> None:
        """Raise one error with the sentence of every rule that does not hold; a rule is (holds, sentence)."""
        if sentences := broken(*rules):
            raise cls(sentences)


def broken(*rules: tuple[bool, str]) -> list[str]:
    """The sentence of every rule that does not hold; a rule is (holds, sentence)."""
    return [sentence for holds, sentence in rules if not holds]


class ThinwireWarning(UserWarning):
    """A sentence for the user about something that goes on, but perhaps not as wished."""


def mistakes_in(part: Callable[[], Any]) -> list[str]:
    """The sentences of the `ThinwireError` that a part raises; none if it raises none."""
    try:
        part()
    except ThinwireError as error:
        return list(error.mistakes)
    return []


def attempt(*parts: Callable[[], Any]) -> list[Any]:
    """The result of each part; if some raise a `ThinwireError`, one error of the first class holds all mistakes."""
    results: list[Any] = []
    errors: list[ThinwireError] = []
    for part in parts:
        try:
            results.append(part())
        except ThinwireError as error:
            errors.append(error)
    if errors:
        raise type(errors[0])([mistake for error in errors for mistake in error.mistakes])
    return results
