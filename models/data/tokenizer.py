"""Tokenizers: bytes, which need no library, or any tokenizer that transformers loads."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.errors.calls import first_line
from thinwire.models import hub
from thinwire.models.data.chats import ChatTokens
from thinwire.models.data.endings import Endings
from thinwire.models.data.parts import ANSWERS, BYTES, Conversation, local_path
from thinwire.models.data.templates import Template, asks_date, counted, followed, is_muted, today
from thinwire.models.data.trial import is_error, tried
from thinwire.models.errors import ModelError, require
from thinwire.models.smollm2 import place_of

_ROWS = 1000
_RULE = f"data.tokenizer must be {BYTES!r}, or the name or folder of one that transformers can load"


class Bytes:
    """A token is a byte of the text in UTF-8. Rows of one length have three more tokens, as in BERT.

    256 begins a row, 257 ends each text, 258 is padding:  256 first 257 second 257 258 258
    """

    vocab_size = 256
    """The largest token in text, plus 1."""
    ends = ()
    """The tokens that end a text: none."""
    padded_vocab_size = 259
    """The largest token in rows of one length, plus 1."""

    def tokens(self, texts: Sequence[str], limit: int | None = None) -> Tensor:
        """The first `limit` tokens, uint8 [N]. Lone surrogates become the bytes that were not UTF-8 again."""
        encoded = bytearray("".join(texts).encode(errors="surrogateescape")[:limit])
        return torch.frombuffer(encoded, dtype=torch.uint8) if encoded else torch.empty(0, dtype=torch.uint8)

    def prompt(self, text: str, *, chat: bool) -> Tensor:
        """The tokens of a text that goes on, int64 [N]."""
        return self.tokens([text]).long()

    def decode(self, tokens: Sequence[int], *, special: bool = True) -> str:
        """The text of tokens; what is no UTF-8, as in the middle of a sign, becomes U+FFFD."""
        return bytes(token for token in tokens if token < self.vocab_size).decode(errors="replace")

    def padded(self, examples: Sequence[tuple[str, ...]], length: int) -> Padded:
        """One row of `length` tokens for each tuple of one or two texts, cut or padded to this length.

        If two texts are too long together, the longer one is cut first, byte by byte.

        Raises:
            ModelError: `length` leaves no room for text.
        """
        special = 1 + len(examples[0])
        require((length > special, f"block_size must be above the {special} special tokens of a sample, got {length}"))
        tokens = torch.full((len(examples), length), self.padded_vocab_size - 1, dtype=torch.int32)
        kinds = torch.zeros(len(examples), length, dtype=torch.uint8)
        num_truncated = 0
        for row, texts in enumerate(examples):
            parts = [text.encode(errors="surrogateescape") for text in texts]
            fitting = _shortened(parts, length - special)
            num_truncated += fitting != parts
            place = 1
            tokens[row, 0] = self.vocab_size
            for kind, part in enumerate(fitting):
                stop = place + len(part)
                tokens[row, place:stop] = torch.tensor(list(part), dtype=torch.int32)
                tokens[row, stop] = self.vocab_size + 1
                kinds[row, place : stop + 1] = kind
                place = stop + 1
        mask = (tokens != self.padded_vocab_size - 1).to(torch.uint8)
        return Padded(tokens, {"attention_mask": mask, "token_type_ids": kinds}, num_truncated)


@dataclass(frozen=True)
class Padded:
    """Texts of varying length as rows of one length."""

    tokens: Tensor
    """int32 [N, T]."""
    side: dict[str, Tensor]
    """The tokenizer's other values of each token, uint8 [N, T]: attention_mask, and token_type_ids if it has them."""
    num_truncated: int
    """The number of rows whose texts were longer than T tokens."""
    words: Tensor | None = None
    """The number of the word that begins with each token, -1 where none does: int32 [N, T]. Only of lists of words."""
    apart: bool = True
    """Whether a token stands between two texts."""


class Pretrained:
    """A tokenizer of transformers, as `AutoTokenizer` loads it.

    Attributes:
        date: that of its chat template, as in 2026-11-29; None if the template asks for none, or there is none.
    """

    def __init__(self, name: str, date: str | None = None) -> None:
        """`date` is what a chat template that asks for it gets; None gives it today's."""
        self._tokenizer = load_tokenizer(name)
        self.date = (date or today()) if asks_date(self._tokenizer) else None
        if not self._tokenizer.get_vocab().keys() - set(self._tokenizer.all_special_tokens):
            raise ModelError(f"{_RULE}, got {name!r}: no token is there, as in a folder without the tokenizer's files")
        self.name = name
        self.vocab_size = self.padded_vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def _encode(self, *texts: list[Any], **options: Any) -> Any:
        """What the tokenizer makes of texts. ModelError if its files let it fail."""
        try:
            return self._tokenizer(*texts, verbose=False, **options)
        except BaseException as error:  # the libraries check little of what the files say
            if not is_error(error):
                raise
            raise ModelError(f"{_RULE}, got {self.name!r}: it fails with {first_line(error)}") from error

    def tokens(self, texts: Sequence[str], limit: int | None = None) -> Tensor:
        """The first `limit` tokens, int32 [N], with the special tokens that the tokenizer adds to each text."""
        pieces, count = [], 0
        for rows in _in_parts(texts):
            encoded = self._encode(_utf8(rows, self.name))["input_ids"]
            pieces.append(np.fromiter(chain.from_iterable(encoded), dtype=np.int32))
            count += len(pieces[-1])
            if limit is not None and count >= limit:
                break
        return torch.from_numpy(np.concatenate([np.empty(0, np.int32), *pieces])[:limit])

    def padded(self, examples: Sequence[tuple[Any, ...]], length: int) -> Padded:
        """One row of `length` tokens for each tuple of one or two texts, or of one list of words, cut or padded.

        Raises:
            ModelError: the tokenizer has no padding token or cannot tell words apart, or `length` has no room for text.
        """
        special = self._tokenizer.num_special_tokens_to_add(pair=len(examples[0]) == 2)
        words = isinstance(examples[0][0], list)
        require(
            (self._tokenizer.pad_token is not None, f"tokenizer {self.name!r} must have a padding token, got none"),
            (length > special, f"block_size must be above the {special} special tokens of a sample, got {length}"),
            (self._tokenizer.is_fast or not words, f"tokenizer {self.name!r} must have a tokenizer.json to tag words"),
        )
        gap = self._gap() if words else ""
        names = [name for name in ("attention_mask", "token_type_ids") if name in self._tokenizer.model_input_names]
        parts: dict[str, list[Any]] = {name: [] for name in ("input_ids", *names, *(["words"] if words else []))}
        num_truncated = 0
        for rows in _in_parts(examples):
            columns = [list(column) for column in zip(*rows, strict=True)]
            if gap:
                columns = [[[row[0], *(gap + word for word in row[1:])] for row in column] for column in columns]
            for column in columns:
                _utf8([*chain.from_iterable(column)] if words else column, self.name)
            encoded = self._encode(
                *columns, padding="max_length", truncation=True, max_length=length, is_split_into_words=words
            )
            num_truncated += sum(bool(encoding.overflowing) for encoding in encoded.encodings or ())
            if words:
                encoded["words"] = [_begun(encoding.word_ids) for encoding in encoded.encodings]
            for name, found in parts.items():
                found.append(np.array(encoded[name], dtype=np.uint8 if name in names else np.int32))
        tensors = {name: torch.from_numpy(np.concatenate(found)) for name, found in parts.items()}
        apart = len(examples[0]) < 2 or self._separates()
        return Padded(tensors.pop("input_ids"), tensors, num_truncated, tensors.pop("words", None), apart)

    def _separates(self) -> bool:
        """Whether a token stands between the two texts of a pair."""
        one, two = self._encode(["a"], add_special_tokens=False), self._encode(["a"], ["a"])
        [ids], [pair] = one["input_ids"], two["input_ids"]
        return ids * 2 not in [pair[start : start + 2 * len(ids)] for start in range(len(pair))]

    def _behind(self) -> int:
        """How many tokens the tokenizer adds behind a text, where it ends."""
        whole, bare = (self._encode(["a"], add_special_tokens=each)["input_ids"][0] for each in (True, False))
        return next((count for count in range(len(whole)) if whole[: len(whole) - count][-len(bare) :] == bare), 0)

    def _gap(self) -> str:
        """What words of a list need before them so that they are those of a text; else some tokenizers glue them."""
        apart, glued, spaced = (
            self._encode([given], is_split_into_words=isinstance(given, list))["input_ids"]
            for given in ("a a", ["a", "a"], ["a", " a"])
        )
        return " " if apart == spaced != glued else ""

    @property
    def padding(self) -> int:
        """A token to fill samples up with, which no token of theirs sees."""
        known = (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id, 0)
        return next(token for token in known if token is not None)

    @property
    def ends(self) -> tuple[int, ...]:
        """The token that ends a text, if there is one."""
        return tuple(token for token in [self._tokenizer.eos_token_id] if token is not None)

    def decode(self, tokens: Sequence[int], *, special: bool = True) -> str:
        """The text of tokens, `special` ones included or not."""
        options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(tokens), **options))

    def prompt(self, text: str, *, chat: bool) -> Tensor:
        """The tokens of a text that goes on, int64 [N]; of a `chat`, its first message and what opens the answer.

        Raises:
            ModelError: the tokenizer has no chat template, or it takes no such message.
        """
        [checked] = _utf8([text], self.name)
        if not chat:
            tokens = self.tokens([checked]).long()
            return tokens[: len(tokens) - self._behind()]
        template = self._template()
        asked = template.fitted(Conversation([{"role": "user", "content": checked}], place="the prompt"))
        said = template.render(asked, add_generation_prompt=True)
        return torch.tensor(self._encoded(said)["input_ids"][0], dtype=torch.int64)

    def chats(
        self, conversations: Sequence[Conversation], source: str, report: Callable[[str], None] = lambda sentence: None
    ) -> list[ChatTokens]:
        """The tokens of each conversation, in the words of the tokenizer's chat template.

        A token belongs to an answer if some of its text does: where a prompt ends in a space, the first token of the
        answer may begin with it. Answers are where the template marks them, or else where `Template` finds them.
        `source` names the conversations in errors; `report` gets a sentence on what the template leaves out.

        Raises:
            ModelError: the tokenizer has no chat template, or it does not fit a conversation.
        """
        template = self._template()
        placed = (replace(chat, place=f"row {row} of {source}") for row, chat in enumerate(conversations))
        chats = [*map(template.fitted, placed)]
        self._report_left_out(template, chats, report)
        if template.marks:
            encoded = [self._marked(template, chat) for chat in chats]
        else:
            encoded = [each for rows in _in_parts(chats) for each in self._found(template, rows)]
        return self._ended(template, chats, encoded)

    def _report_left_out(
        self, template: Template, chats: Sequence[Conversation], report: Callable[[str], None]
    ) -> None:
        seen, left = Counter[str](), Counter[str]()
        for chat in chats:
            for what, is_out in template.left_out(chat):
                seen[what] += 1
                left[what] += is_out
        if told := [f"{what} ({count} of {seen[what]})" for what, count in left.items() if count]:
            report(f"the chat template of tokenizer {self.name!r} leaves out {', '.join(told)}")

    def _found(self, template: Template, chats: Sequence[Conversation]) -> Iterator[ChatTokens]:
        """The tokens of conversations whose answers are looked for."""
        texts = [*map(template.render, chats)]
        found = self._encoded(*texts)
        for text, chat, ids, places in zip(texts, chats, found["input_ids"], found["offset_mapping"], strict=True):
            begins, ends = torch.tensor(places, dtype=torch.int64).view(-1, 2).unbind(1)
            counts = torch.zeros(len(begins), dtype=torch.bool)
            for begin, end in template.answers(chat, text):
                counts |= ((begins >= begin) | (ends > begin)) & (begins < end)
            yield ChatTokens(torch.tensor(ids, dtype=torch.int32), counts)

    def _ended(self, template: Template, chats: Sequence[Conversation], encoded: list[ChatTokens]) -> list[ChatTokens]:
        """Conversations whose answers have an end that counts.

        Raises:
            ModelError: the template ends no answer, and there is no token to end it with.
        """
        added = self._tokenizer.added_tokens_decoder.items()
        special = {*self._tokenizer.all_special_ids, *(token for token, each in added if each.special)}
        endings = Endings(special, cache(lambda token: not self.decode([token]).strip()))
        closed = (row for row, chat in enumerate(chats) if counted(chat)[-1:] == [len(chat.messages) - 1])
        if (row := next(closed, None)) is not None:
            text = template.render(chats[row])
            _, stop = template.words(chats[row], len(chats[row].messages) - 1, text)
            if not endings.known(encoded[row], self._encoded(text[stop:])["input_ids"][0]):
                encoded = [
                    endings.with_next(each, self._next(template, endings, chat))
                    for each, chat in zip(encoded, chats, strict=True)
                ]
        return list(map(endings.named, encoded))

    def _next(self, template: Template, endings: Endings, chat: Conversation) -> int:
        """The token that ends the last answer where the template does not: what would begin the next turn, or eos."""
        more = followed(chat)
        try:
            longer = template.render(more)
            begun = longer[template.words(more, len(chat.messages) - 1, longer)[1] :]
        except ModelError:  # nothing may follow
            begun = ""
        ids = self._encoded(begun)["input_ids"][0]
        end = ids[0] if ids and endings.is_special(ids[0]) else self._tokenizer.eos_token_id
        if end is None:
            raise ModelError(
                f"the chat template of tokenizer {self.name!r} must end an answer by a token, and does not, as in "
                f"{chat.place}; name an eos_token in its tokenizer_config.json, which then ends answers"
            )
        return int(end)

    def _template(self) -> Template:
        """Its chat template. ModelError if it has none."""
        return Template(
            self._tokenizer,
            self.name,
            lambda text: [end for _, end in self._encoded(text)["offset_mapping"][0]],
            self.date or "",
        )

    def _encoded(self, *texts: str) -> Any:
        """Texts of a chat template as tokens and their offsets."""
        given = _utf8(texts, self.name)
        return self._encode(given, add_special_tokens=False, return_offsets_mapping=True)

    def _marked(self, template: Template, chat: Conversation) -> ChatTokens:
        """The tokens of a conversation whose answers the template marks itself."""
        given = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = template.render(chat, **given, tokenizer_kwargs={"return_offsets_mapping": True})
        counts = torch.tensor(found["assistant_masks"]).bool()
        begins, ends = torch.tensor(found["offset_mapping"], dtype=torch.int64).view(-1, 2).unbind(1)
        for index, message in enumerate(chat.messages):
            if message["role"] == ANSWERS and is_muted(message):
                begin, end = template.words(chat, index, template.render(chat))
                turns = torch.cat([counts[:1], counts[1:] != counts[:-1]]).cumsum(0)
                counts &= ~torch.isin(turns, turns[(begins < end) & (ends > begin)])
        if chat.first and (answers := counted(chat)):
            words, _ = template.words(chat, answers[0], template.render(chat))
            earlier = (~counts & (begins < words)).nonzero()  # the last of them is before what opens the answer
            counts[: int(earlier.max()) + 1 if len(earlier) else 0] = False
        return ChatTokens(torch.tensor(found["input_ids"], dtype=torch.int32), counts)


def load_tokenizer(name: str) -> Any:
    """A tokenizer of transformers, without code of its own.

    Raises:
        ModelError: there is no such tokenizer, or this release of transformers cannot read it.
    """
    place = place_of(name)
    local_path(place, _RULE)
    from transformers import AutoTokenizer

    try:
        if file := hub.file_of(place, "tokenizer.json"):
            facts = file.stat()
            told = {"tokenizer": str(file), "mark": [facts.st_size, facts.st_mtime_ns]}
            tried(json.dumps(told), f"{_RULE}, got {name!r}")
        return hub.load(AutoTokenizer, place)
    except ModelError:
        raise
    except BaseException as error:  # of a file of another release, tokenizers raises nothing narrower
        if not is_error(error):
            raise
        raise ModelError(f"{_RULE}, got {name!r}: {hub.reason(name, error)}") from error


def make_tokenizer(name: str, date: str | None = None) -> Bytes | Pretrained:
    """The tokenizer with this name: "bytes", or the name or folder of a tokenizer of transformers, as on `date`.

    Raises:
        ModelError: there is no such tokenizer.
    """
    return Bytes() if name == BYTES else Pretrained(name, date)


def _shortened(parts: Sequence[bytes], room: int) -> list[bytes]:
    """Cut one or two parts so that they have at most `room` bytes together. The longer one is cut first."""
    first, *rest = parts
    if not rest:
        return [first[:room]]
    (second,) = rest
    # each part may use half of the room, and what the other part leaves of its half
    kept = max((room + 1) // 2, room - len(second))
    return [first[:kept], second[: room - min(kept, len(first))]]


def _begun(words: Sequence[int | None]) -> list[int]:
    """Of the word of each token, its number where it begins, and -1 elsewhere."""
    return [-1 if word is None or word == before else word for before, word in pairwise([None, *words])]


def _in_parts(rows: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """The rows, a thousand at a time: lists of Python numbers take 30 times the memory of the tokens."""
    return (rows[start : start + _ROWS] for start in range(0, len(rows), _ROWS))


def _utf8(texts: Sequence[str], tokenizer: str) -> list[str]:
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise ModelError(
            f"a text must be UTF-8 for tokenizer {tokenizer!r}, got other bytes; convert it, or take {BYTES!r}"
        ) from error
    return list(texts)
