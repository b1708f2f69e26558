"""Conversations as samples: the loss counts the answers, and several conversations share a sample of `block_size`.

Each conversation begins at position 0 and ends without a target. Models that read `position_ids` see from them where
the next one begins, and no token sees another conversation.

Tensor names end in their shape: B samples, T tokens.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from thinwire.models.data.parts import ANSWERS, MARKS, ROLES, Conversation
from thinwire.models.data.samples import TokenRows
from thinwire.models.digest import tensor_lines, weights_digest
from thinwire.models.errors import ModelError, require
from thinwire.models.tasks import IGNORE

_ANSWER = f"an answer is a message of the role {ANSWERS} after another message, or tokens with labels"
LAYOUTS = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "input", "output"),
    ("instruction", "output"),
    ("input_ids", "labels"),
    ("input_ids",),
)
"""The columns of conversations that are found by themselves."""
BESIDE = ("system", "tools")
"""Columns that are read beside them: the system's message, and the tools that answers may call."""


def conversation_of(values: Sequence[Any], place: str, *, system: Any = None, tools: Any = None) -> Conversation:
    """A conversation from the values of a row's columns; `place` names the row in errors.

    One value is a list of messages. Of several, the last one is the answer and those before it the question: texts,
    or lists of messages. `system` is what the system says first, and `tools` a list of tools, or its JSON.

    Raises:
        ModelError: they are something else.
    """
    known, first = _tools(tools, place), _messages(system, place, "system") if system else []
    if len(values) == 1:
        messages = _weighted(_messages(values[0], place), place)
        twice = bool(first) and messages[0]["role"] == "system"
        require((not twice, f"a system's message must be in column system or among the messages, got both in {place}"))
        return Conversation([*first, *messages], tools=known)
    *asked, answer = values
    if all(value is None or isinstance(value, str) for value in asked):
        question = _messages("\n".join(value for value in asked if value), place, "user")
    else:
        question = [message for value in asked if value for message in _messages(value, place, "user")]
    question = [*first, *question]
    return Conversation([*question, *_weighted(_messages(answer, place, ANSWERS), place)], len(question), known)


def _tools(given: Any, place: str) -> Sequence[dict[str, Any]]:
    try:
        tools = json.loads(given) if isinstance(given, str) and given.strip() else given or ()
    except ValueError:
        tools = None
    fits = isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)
    require((fits, f"tools must be a list of objects, or its JSON, got {_short(given)} in {place}"))
    return [dict(tool) for tool in tools or ()] or ()


def _messages(value: Any, place: str, role: str | None = None) -> list[dict[str, Any]]:
    """The messages of a value, where a text is one message of `role`."""
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": value}]
    rule = "a conversation must be a list of messages, each with role and content (or from and value)"
    listed = isinstance(value, list) and all(isinstance(message, Mapping) for message in value)
    hint = "; digits of CSV are read as numbers: write the rows as JSON" if isinstance(value, int | float) else ""
    require((listed and bool(value), f"{rule}, got {_short(value)} in {place}{hint}"))
    messages = []
    for given in value:
        message = {name: field for name, field in given.items() if field is not None}  # tables fill up with None
        if "role" not in message and "from" in message:
            who = message.pop("from")
            require((who in list(ROLES), f"from must be one of {', '.join(ROLES)}, got {_short(who)} in {place}"))
            message = {"role": ROLES[who], "content": message.pop("value", None), **message}
        answered = isinstance(message.get("content"), str | list) or "tool_calls" in message
        require((isinstance(message.get("role"), str) and answered, f"{rule}, got {_short(given)} in {place}"))
        messages.append(message)
    return messages


def _weighted(messages: list[dict[str, Any]], place: str) -> list[dict[str, Any]]:
    """The messages. ModelError if one says, as in OpenAI's format or axolotl's, that it counts in part."""
    answers = [message for message in messages if message["role"] == ANSWERS]
    others = [_short(each[name]) for name in MARKS for each in answers if each.get(name, 1) not in (0, 1)]
    if others:
        raise ModelError(f"weight of an answer must be 0 or 1, and train true or false, got {others[0]} in {place}")
    return messages


def encoded_of(values: Sequence[Sequence[int]], place: str) -> ChatTokens:
    """A conversation that is token ids already, and labels: what is not `IGNORE` counts. Without labels, all counts.

    Raises:
        ModelError: a label is another token, or there is not one for each.
    """
    tokens, *labels = (torch.tensor(each, dtype=torch.int32) for each in values)
    targets = labels[0] if labels else tokens
    fits = tokens.shape == targets.shape and bool(((targets == tokens) | (targets == IGNORE)).all())
    require((fits, f"labels must be {IGNORE} or the token itself, one for each of input_ids, got others in {place}"))
    return ChatTokens(tokens, targets != IGNORE)


def _short(value: Any) -> str:
    said = repr(value)
    return said if len(said) <= 80 else said[:77] + "..."


@dataclass(frozen=True)
class ChatTokens:
    """The tokens of a conversation."""

    tokens: Tensor
    """int32 [N]."""
    counted: Tensor
    """Which tokens are those of answers, bool [N]."""
    ends: frozenset[tuple[int, ...]] = frozenset()
    """The special tokens, in a row, that end an answer: those of all its answers."""


class ChatSamples(TokenRows):
    """Samples of `block_size` tokens, each one conversation or several whole ones, and padding behind them.

    The target of a token is the next token of its conversation, if that belongs to an answer; else it does not count,
    and is `IGNORE`. With packing, position_ids are a side input: the place of each token in its conversation.

    Attributes:
        lengths: the tokens of each sample before its padding, int64 [N].
    """

    lengths: Tensor

    def __init__(self, conversations: Sequence[ChatTokens], block_size: int, padding: int, *, packing: bool) -> None:
        """Put conversations into samples. Longer ones are cut, and those without a counted target are left out.

        Raises:
            ModelError: none is left.
        """
        cut = [ChatTokens(each.tokens[:block_size], each.counted[:block_size]) for each in conversations]
        self.num_cut = sum(len(each.tokens) > block_size for each in conversations)
        kept = [each for each in cut if each.counted[1:].any()]
        self.num_unanswered = sum(not each.counted[1:].any() for each in conversations)
        self.num_left_out = len(cut) - len(kept) - self.num_unanswered
        if not kept:
            mend = "raise data.block_size" if self.num_left_out else _ANSWER
            raise ModelError(
                f"at least one conversation must have an answer within data.block_size of {block_size} tokens, got none"
                f" of {len(cut)}; {mend}"
            )
        lengths = [len(each.tokens) for each in kept]
        self.rows = pack(lengths, block_size) if packing else [[index] for index in range(len(kept))]
        tokens = torch.full((len(self.rows), block_size), padding, dtype=torch.int32)
        self.positions = torch.empty_like(tokens)
        side = {"position_ids": self.positions} if packing else {}
        super().__init__(tokens, torch.full_like(tokens, IGNORE), side)
        self.lengths = torch.tensor([sum(lengths[member] for member in row) for row in self.rows])
        for row, members in enumerate(self.rows):
            start = 0
            for member in members:
                each, stop = kept[member], start + lengths[member]
                self.tokens[row, start:stop] = each.tokens
                self.labels[row, start : stop - 1] = torch.where(each.counted[1:], each.tokens[1:], IGNORE)
                self.positions[row, start:stop] = torch.arange(stop - start)
                start = stop
            self.positions[row, start:] = torch.arange(block_size - start)
        tensors = {"tokens": self.tokens, "labels": self.labels, **({"positions": self.positions} if packing else {})}
        self.digest = weights_digest(tensor_lines(tensors))

    def notes(self) -> list[str]:
        """Sentences for the user: samples, padding, what was cut, and how much counts."""
        length = self.tokens.shape[1]
        counted, of = int((self.labels != IGNORE).sum()), int(self.lengths.sum())
        notes = [
            f"{sum(map(len, self.rows))} conversations in {len(self)} samples of {length} tokens; "
            f"{1 - of / self.tokens.numel():.1%} of the tokens are padding; the loss counts {counted / of:.1%} of the "
            "others"
        ]
        if self.num_cut:
            notes.append(f"conversations cut to {length} tokens: {self.num_cut}")
        if self.num_left_out:
            notes.append(f"conversations left out, as no answer is in their first {length} tokens: {self.num_left_out}")
        if self.num_unanswered:
            notes.append(f"conversations left out, as they have no answer: {self.num_unanswered}; {_ANSWER}")
        return notes

    def first(self) -> list[tuple[Tensor, bool]]:
        """The first conversation in pieces: tokens in a row that all count, or that all do not."""
        inside = self.positions[0].tolist()
        stop = inside.index(0, 1) if 0 in inside[1:] else len(inside)
        counts = torch.cat([torch.tensor([False]), self.labels[0, : stop - 1] != IGNORE])
        starts = [0, *((counts[1:] != counts[:-1]).nonzero().flatten() + 1).tolist(), stop]
        return [(self.tokens[0, a:b], bool(counts[a])) for a, b in pairwise(starts)]


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Rows of at most `room` tokens from pieces of these lengths: the indices of each row's pieces, rising.

    Best fit decreasing: the longest first, each into the row that it fills up best. Rows come in the order of their
    first pieces.
    """
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # what is left of each row, and the row; sorted
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(spaces, (lengths[index], -1))
        if place < len(spaces):
            left, row = spaces.pop(place)
        else:
            left, row = room, len(rows)
            rows.append([])
        rows[row].append(index)
        insort(spaces, (left - lengths[index], row))
    return sorted(sorted(row) for row in rows)


def in_words(pieces: Sequence[tuple[str, bool]]) -> str:
    """Texts of a conversation in a note, those that count between [[ and ]], without control characters."""
    shown = visible("".join(f"[[{text}]]" if counts else text for text, counts in pieces))
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]} ..."


def visible(text: str) -> str:
    """A text with a sign in place of each control character, which a terminal would act on."""
    return "".join("\N{REPLACEMENT CHARACTER}" if _CONTROLS.match(sign) else sign for sign in text)


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal acts on, but for ends of lines and tabs; what turns the order of signs around; and no signs."""


_SHOWN = 2000
"""The most characters of a conversation that a run prints."""


def require_positions(names: Sequence[str], side: Mapping[str, Tensor]) -> None:
    """Raise ModelError if samples hold several texts and the model's layers, which read `names`, see one."""
    if "position_ids" in side and "position_ids" not in names:
        raise ModelError(
            "a sample must hold one text for this model, as with data.packing: false: its layers do not read "
            "position_ids, so texts in one sample would see each other"
        )
