"""Tokenizers: bytes, which need no library, or any tokenizer that transformers loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.errors.calls import first_line
from thinwire.models import hub
from thinwire.models.data.options import BYTES
from thinwire.models.data.parts import local_path
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
    padded_vocab_size = 259
    """The largest token in rows of one length, plus 1."""

    def tokens(self, texts: Sequence[str], limit: int | None = None) -> Tensor:
        """The first `limit` tokens, uint8 [N]. Lone surrogates become the bytes that were not UTF-8 again."""
        encoded = bytearray("".join(texts).encode(errors="surrogateescape")[:limit])
        return torch.frombuffer(encoded, dtype=torch.uint8) if encoded else torch.empty(0, dtype=torch.uint8)

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


class Pretrained:
    """A tokenizer of transformers, as `AutoTokenizer` loads it."""

    def __init__(self, name: str) -> None:
        self._tokenizer = load_tokenizer(name)
        if not self._tokenizer.get_vocab().keys() - set(self._tokenizer.all_special_tokens):
            raise ModelError(f"{_RULE}, got {name!r}: no token is there, as in a folder without the tokenizer's files")
        self.name = name
        self.vocab_size = self.padded_vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def _encode(self, *texts: list[str], **options: Any) -> Any:
        """What the tokenizer makes of texts. ModelError if its files let it fail."""
        try:
            return self._tokenizer(*texts, verbose=False, **options)
        except Exception as error:  # the libraries check little of what the files say
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

    def padded(self, examples: Sequence[tuple[str, ...]], length: int) -> Padded:
        """One row of `length` tokens for each tuple of one or two texts, cut or padded to this length.

        Raises:
            ModelError: the tokenizer has no padding token, or `length` leaves no room for text.
        """
        special = self._tokenizer.num_special_tokens_to_add(pair=len(examples[0]) == 2)
        require(
            (self._tokenizer.pad_token is not None, f"tokenizer {self.name!r} must have a padding token, got none"),
            (length > special, f"block_size must be above the {special} special tokens of a sample, got {length}"),
        )
        names = [name for name in ("attention_mask", "token_type_ids") if name in self._tokenizer.model_input_names]
        parts: dict[str, list[Any]] = {name: [] for name in ("input_ids", *names)}
        num_truncated = 0
        for rows in _in_parts(examples):
            columns = [_utf8(column, self.name) for column in zip(*rows, strict=True)]
            encoded = self._encode(*columns, padding="max_length", truncation=True, max_length=length)
            num_truncated += sum(bool(encoding.overflowing) for encoding in encoded.encodings or ())
            for name, found in parts.items():
                found.append(np.array(encoded[name], dtype=np.int32 if name == "input_ids" else np.uint8))
        tensors = {name: torch.from_numpy(np.concatenate(found)) for name, found in parts.items()}
        return Padded(tensors.pop("input_ids"), tensors, num_truncated)


def load_tokenizer(name: str) -> Any:
    """A tokenizer of transformers, without code of its own.

    Raises:
        ModelError: there is no such tokenizer, or this release of transformers cannot read it.
    """
    place = place_of(name)
    local_path(place, _RULE)
    from transformers import AutoTokenizer

    try:
        return hub.load(AutoTokenizer, place)
    except ModelError:
        raise
    except Exception as error:  # of a file of another release, tokenizers raises nothing narrower
        raise ModelError(f"{_RULE}, got {name!r}: {hub.reason(name, error)}") from error


def make_tokenizer(name: str) -> Bytes | Pretrained:
    """The tokenizer with this name: "bytes", or the name or folder of a tokenizer of transformers.

    Raises:
        ModelError: there is no such tokenizer.
    """
    return Bytes() if name == BYTES else Pretrained(name)


def _shortened(parts: Sequence[bytes], room: int) -> list[bytes]:
    """Cut one or two parts so that they have at most `room` bytes together. The longer one is cut first."""
    first, *rest = parts
    if not rest:
        return [first[:room]]
    (second,) = rest
    # each part may use half of the room, and what the other part leaves of its half
    kept = max((room + 1) // 2, room - len(second))
    return [first[:kept], second[: room - min(kept, len(first))]]


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
