"""Messages to and from the membership server: JSON words and blobs behind them, as one message of the mesh.

bytes of the words | words, with the size of each blob | blobs

A message is checked where it arrives. A process that has the keys may still run another program: what it leaves out
must not end the server, or the process that gets its message.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from thinwire.pipeline.errors import WireError

Message = tuple[dict[str, Any], list[bytes]]
"""Words, and blobs."""
_HEAD = struct.Struct("!I")
LONGEST_WORDS = 1 << 20
"""The most bytes of words."""


def pack(words: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> bytes:
    """A message as bytes."""
    text = json.dumps({**words, "sizes": [len(blob) for blob in blobs]}).encode()
    return b"".join([_HEAD.pack(len(text)), text, *blobs])


def unpack(data: bytes) -> Message:
    """The message in these bytes. WireError if they are none."""
    length = _HEAD.unpack_from(data)[0] if len(data) >= _HEAD.size else LONGEST_WORDS + 1
    if length > LONGEST_WORDS:
        raise WireError(f"a message must have at most {LONGEST_WORDS} bytes of words")
    start = _HEAD.size + length
    try:
        words = json.loads(data[_HEAD.size : start])
    except (ValueError, RecursionError) as error:
        raise WireError("the words of a message must be JSON") from error
    sizes = words.pop("sizes", None) if isinstance(words, dict) else None
    left = len(data) - start
    if not isinstance(sizes, list) or not all(map(is_count, sizes)) or sum(sizes) != left:
        raise WireError(f"a message must say the sizes of its blobs, which have {left} bytes, got {sizes!r:.60}")
    blobs = []
    for size in sizes:
        blobs.append(data[start : start + size])
        start += size
    return words, blobs


def is_count(value: object) -> bool:
    """Whether a value of JSON is a whole number from 0 on, of at most 63 bits."""
    return type(value) is int and 0 <= value < 1 << 63


def _is_amount(value: object) -> bool:
    """Whether it counts something that is there: a mean is weighted by it."""
    return is_count(value) and value != 0


def _is_last(value: object) -> bool:
    """Whether it is an object with the index of the last pass by phase; -1 before the first."""
    return isinstance(value, dict) and all(
        is_count(each) or (type(each) is int and each == -1) for each in value.values()
    )


def _by_number(value: object, holds: Callable[[object], bool]) -> bool:
    """Whether it is an object with numbers for names, and such values."""
    return isinstance(value, dict) and all(map(_is_number, value)) and all(map(holds, value.values()))


def _is_number(text: str) -> bool:
    return len(text) < 20 and text.isascii() and text.isdecimal()


Check = tuple[str, Callable[[object], bool]]
"""What a field must be, in words; and whether a value is that."""
COUNT: Check = "a whole number from 0 on", is_count
TEXT: Check = "text", lambda value: isinstance(value, str)
TRUTH: Check = "true or false", lambda value: isinstance(value, bool)
AMOUNT: Check = "a whole number from 1 on", _is_amount
AMOUNTS: Check = "whole numbers from 1 on by number", lambda value: _by_number(value, _is_amount)
PASSES: Check = "counts by stage and phase", lambda value: _by_number(value, _is_last)
OTHERS: Check = "a list of numbers", lambda value: isinstance(value, list) and all(map(is_count, value))
TEXTS: Check = (
    "texts by name",
    lambda value: isinstance(value, dict) and all(isinstance(each, str) for each in value.values()),
)

Kinds = Mapping[str, Mapping[str, Check]]
"""The fields of each kind of message."""
_SENDER = {"replica": COUNT, "process": COUNT, "life": TEXT}
"""Of which start of a replica a stage process is; a life is a text that differs from start to start."""
SAID: Kinds = {
    "begin": {**_SENDER, "held": COUNT, "digest": TEXT},
    "end": {**_SENDER, "held": COUNT, "digest": TEXT, "step": COUNT, "passes": PASSES},
    "deliver": {**_SENDER, "step": COUNT, "samples": AMOUNT, "last": TRUTH},
    "applied": {**_SENDER, "step": COUNT, "digest": TEXT, "passes": PASSES, "last": TRUTH},
}
"""What a stage process sends."""
ANSWERED: Kinds = {
    "go": {"stop": TRUTH},
    "take": {"stop": TRUTH, "step": COUNT, "giver": COUNT, "passes": PASSES},
    "exchange": {"stop": TRUTH, "samples": AMOUNTS, "others": OTHERS, "gives": TRUTH},
    "stopped": {"stop": TRUTH},
    "failed": {"text": TEXT},
}
"""What it gets."""
LAUNCHED: Kinds = {
    "launcher": {"replica": COUNT, "agreed": TEXTS},
    "comes": {"replica": COUNT, "life": TEXT},
    "loses": {"replica": COUNT, "life": TEXT, "for_good": TRUTH},
    "stop": {"replica": COUNT},
}
"""What a launcher sends of its replica; first who it is, and what all replicas must agree on."""
WELCOMED: Kinds = {"welcome": {"noted": TEXT}, "wait": {"text": TEXT}, "refused": {"text": TEXT}}
"""What it gets."""
_BLOBS = {
    "begin": range(1),
    "end": range(1, 2),
    "deliver": None,
    "applied": range(2),
    "take": range(1, 2),
    "exchange": None,
}
"""How many blobs a kind of message may have: any number if None, and none if it is not here."""


def check(message: Message, kinds: Kinds) -> None:
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
    allowed = _BLOBS.get(kind, range(1))
    if allowed is not None and len(blobs) not in allowed:
        raise WireError(f"a message of the kind {kind} must not have {len(blobs)} blobs")


def kind_of(told: Mapping[int, Message]) -> str:
    """The kind of what all processes of a replica send. WireError if it is not the same, or some alone give weights."""
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
        raise WireError("all processes of a replica must send a message of the same kind, after the same step")
    return str(kinds.pop()[0])
