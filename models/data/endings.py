"""What ends an answer. A model stops where it says a token that its generation settings name as an end.

So each answer must end by such a token, and the token must count. Where a template ends a turn only by what begins the
next one, that token is the end; behind the last answer stands the one that would come there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import torch

from thinwire.models.data.chats import ChatTokens


class Endings:
    """Finds the tokens that end answers among those that count."""

    def __init__(self, special: Collection[int], is_blank: Callable[[int], bool]) -> None:
        """`special` are tokens that no text has; `is_blank` tells tokens of spaces and line ends."""
        self._special, self._is_blank = {*special}, is_blank

    def is_special(self, token: int) -> bool:
        """Whether a token is one that no text has."""
        return token in self._special

    def known(self, chat: ChatTokens, behind: Sequence[int]) -> bool:
        """Whether the last answer of a conversation has an end. `behind` are the tokens behind its words.

        Some tokenizers know no special tokens: there a single token behind the words is one from now on.
        """
        signs = [token for token in behind if not self._is_blank(token)]
        if len(signs) == 1 and signs[0] in chat.tokens[chat.counted].tolist():
            self._special.update(signs)
        return bool(len(chat.tokens) and chat.counted.any() and self._before(chat, _lasts(chat)[-1]))

    def with_next(self, chat: ChatTokens, last: int) -> ChatTokens:
        """A conversation in which the special token behind each answer counts; `last` comes behind all of it."""
        tokens, counts = chat.tokens, chat.counted.clone()
        if len(counts) and counts[-1]:
            tokens = torch.cat([tokens, torch.tensor([last], dtype=tokens.dtype)])
            counts = torch.cat([counts, torch.tensor([False])])
        for place in _lasts(ChatTokens(tokens, counts)):
            if place + 1 < len(tokens):
                counts[place + 1] = self.is_special(int(tokens[place + 1])) or place + 2 == len(tokens)
        return ChatTokens(tokens, counts)

    def named(self, chat: ChatTokens) -> ChatTokens:
        """A conversation with what ends its answers."""
        return replace(chat, ends=frozenset(filter(None, (self._before(chat, place) for place in _lasts(chat)))))

    def _before(self, chat: ChatTokens, place: int) -> tuple[int, ...]:
        """The special tokens in a row that end at a place, but for blank ones."""

        def backwards() -> Iterator[int]:
            for token in reversed(chat.tokens[: place + 1].tolist()):
                if token in self._special:
                    yield token
                elif not self._is_blank(token):
                    return

        return tuple(backwards())[::-1]


def _lasts(chat: ChatTokens) -> list[int]:
    """The places of the last tokens of answers."""
    follows = torch.cat([chat.counted[1:], torch.tensor([False])])
    return [int(place) for place in (chat.counted & ~follows).nonzero()]


def missing(known: Collection[int], ends: Collection[tuple[int, ...]]) -> list[int]:
    """The tokens that a model must know as ends beside those that it knows: the first of each that has none of them."""
    return sorted({end[0] for end in ends if not {*end} & {*known}})
