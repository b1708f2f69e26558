"""The fields of each kind of message to and from the meeting place; a message is checked where it is heard.

A process that has the keys may still run another program. What it leaves out must not end the meeting place, or the
process that hears it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from thinwire.pipeline.errors import WireError
from thinwire.pipeline.replicas.membership.messages import Message, is_count


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_truth(value: object) -> bool:
    return isinstance(value, bool)


def _is_amount(value: object) -> bool:
    """Whether it counts something that is there: a mean is weighted by it."""
    return is_count(value) and value != 0


def _is_amounts(value: object) -> bool:
    """Whether it is an object with numbers for names, and amounts for values, such as samples by replica."""
    return isinstance(value, dict) and all(map(_is_number, value)) and all(map(_is_amount, value.values()))


def _is_passes(value: object) -> bool:
    """Whether it is an object with, by stage, the index of its last pass by phase; -1 before the first."""
    return isinstance(value, dict) and all(
        _is_number(stage)
        and isinstance(last, dict)
        and all(is_count(index) or (type(index) is int and index == -1) for index in last.values())
        for stage, last in value.items()
    )


def _is_others(value: object) -> bool:
    return isinstance(value, list) and all(map(is_count, value))


def _is_number(text: str) -> bool:
    return len(text) < 20 and text.isascii() and text.isdecimal()


Check = tuple[str, Callable[[object], bool]]
"""What a field must be, in words; and whether a value is that."""
COUNT: Check = "a whole number from 0 on", is_count
TEXT: Check = "text", _is_text
TRUTH: Check = "true or false", _is_truth
AMOUNT: Check = "a whole number from 1 on", _is_amount
AMOUNTS: Check = "whole numbers from 1 on by number", _is_amounts
PASSES: Check = "counts by stage and phase", _is_passes
OTHERS: Check = "a list of numbers", _is_others

SAID: Mapping[str, Mapping[str, Check]] = {
    "begin": {"held": COUNT, "digest": TEXT},
    "end": {"held": COUNT, "digest": TEXT, "step": COUNT, "passes": PASSES},
    "deliver": {"step": COUNT, "samples": AMOUNT, "last": TRUTH},
    "applied": {"step": COUNT, "digest": TEXT, "passes": PASSES, "last": TRUTH},
}
"""What a stage process says to the meeting place."""
ANSWERED: Mapping[str, Mapping[str, Check]] = {
    "go": {"stop": TRUTH},
    "take": {"stop": TRUTH, "step": COUNT, "giver": COUNT, "passes": PASSES},
    "exchange": {"stop": TRUTH, "samples": AMOUNTS, "others": OTHERS, "gives": TRUTH},
    "stopped": {"stop": TRUTH},
    "failed": {"text": TEXT},
}
"""What the meeting place answers."""
LAUNCHED: Mapping[str, Mapping[str, Check]] = {
    "comes": {"replica": COUNT},
    "loses": {"replica": COUNT, "for_good": TRUTH},
    "stop": {},
}
"""What a launcher says of its replica."""
_BLOBS = {"begin": range(1), "end": range(1, 2), "applied": range(2), "take": range(1, 2)}
"""How many blobs a kind of message may have; any number if it is not here."""


def check(message: Message, kinds: Mapping[str, Mapping[str, Check]]) -> None:
    """Raise WireError if a message is of no known kind, or if a field of it is missing or wrong."""
    words, blobs = message
    kind = words.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise WireError(f"a message must be one of {', '.join(kinds)}, got {kind!r:.60}")
    for name, (wanted, holds) in kinds[kind].items():
        if name not in words:
            raise WireError(f"a message of the kind {kind} must have the field {name}, {wanted}")
        if not holds(words[name]):
            raise WireError(f"{name} of a message of the kind {kind} must be {wanted}, got {words[name]!r:.60}")
    if len(blobs) not in _BLOBS.get(kind, range(len(blobs) + 1)):
        raise WireError(f"a message of the kind {kind} must not have {len(blobs)} blobs")


def kind_of(told: Mapping[int, Message]) -> str:
    """The kind of what all processes of a replica say. WireError if it is not the same, or some alone give weights."""
    kinds = {
        # fields of other kinds were not checked, so they are not looked at
        (
            words["kind"],
            *(words[name] for name in ("step", "last") if name in SAID[words["kind"]]),
            words["kind"] == "applied" and len(blobs),
        )
        for words, blobs in told.values()
    }
    if len(kinds) > 1:
        raise WireError("all processes of a replica must say a message of the same kind, after the same step")
    return str(kinds.pop()[0])
