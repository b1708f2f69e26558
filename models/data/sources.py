"""The sources of data, as a table. The first source that fits is read.

To add a source, write a function that reads it (`read_digits` is a simple one) and a row of `SOURCES`. Bundled data and
plain text files do not import `datasets`, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from thinwire.errors.imports import is_path
from thinwire.models.data import tables
from thinwire.models.data.files import holds_cifar10, is_text_file, read_cifar10, read_lines
from thinwire.models.data.own import read_own
from thinwire.models.data.parts import Columns, Conversation, Labelled, Part, local_path, require_no_split
from thinwire.models.errors import ModelError

if TYPE_CHECKING:
    from thinwire.models.data.kinds import Kind

_PARAGRAPH = 40
"""A paragraph has at least this many characters."""


def read_topics(part: Part, columns: Columns) -> list[str]:
    """The topics of Python's documentation.

    Releases of Python differ in their documentation, so all machines of a run need the same release.
    """
    from pydoc_data.topics import topics

    require_no_split(part)
    return [topics[topic] for topic in sorted(topics)]


def read_halves(part: Part, columns: Columns) -> Labelled:
    """The paragraphs of Python's documentation, each as a pair of halves. Every other pair is swapped (label 0)."""
    halves = _halves(part)
    labels = torch.arange(len(halves)) % 2
    examples = [pair if label else pair[::-1] for pair, label in zip(halves, labels.tolist(), strict=True)]
    return Labelled(examples, labels, 2)


def read_paragraphs(part: Part, columns: Columns) -> list[Conversation]:
    """The paragraphs of Python's documentation: one half is asked for with the other."""
    asked = "Continue this paragraph of Python's documentation:\n\n"
    return [
        Conversation([{"role": "user", "content": asked + begin}, {"role": "assistant", "content": rest}])
        for begin, rest in _halves(part)
        if len(rest) >= _PARAGRAPH
    ]


def _halves(part: Part) -> list[tuple[str, str]]:
    """The two halves of each paragraph of Python's documentation."""
    from pydoc_data.topics import topics

    require_no_split(part)
    paragraphs = [" ".join(part.split()) for name in sorted(topics) for part in topics[name].split("\n\n")]
    long = (paragraph.split(" ") for paragraph in dict.fromkeys(paragraphs) if len(paragraph) >= _PARAGRAPH)
    return [(" ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])) for words in long]


def read_digits(part: Part, columns: Columns) -> Labelled:
    """1797 handwritten digits of 8 x 8 pixels."""
    require_no_split(part)
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ModelError("'digits' needs scikit-learn: pip install 'thinwire[digits]'") from error
    digits = load_digits()
    pixels = (digits.images * (255 / 16)).round().astype(np.uint8)  # stored as 0..16
    return Labelled(list(pixels), torch.from_numpy(digits.target).long(), 10)


Read = Callable[[Part, Columns], Any]
"""Reads a part as samples of one kind, as `read` says."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A row of the table: the names that mean this source, and how to read it as each kind of samples."""

    name: str
    """The name of the source. A user asks for bundled data by this name."""
    fits: Callable[[str], bool] | None = None
    """Whether a name in the options means this source. None for bundled data: only its own name does."""
    reader: Callable[[Kind], Read | None]
    """How it is read as a kind of samples; None if it cannot give them."""
    gives: str = "rows"
    """The kinds that it gives, in words."""
    stream: Callable[[Part, Columns, int, int], tables.Rows] | None = None
    """Reads texts row by row, shuffled within so many rows by a seed; None if the source is read at once."""

    def is_named(self, name: str) -> bool:
        """Whether a name in the options means this source."""
        return name == self.name if self.fits is None else self.fits(name)


def _table(name: str, fits: Callable[[str], bool], opened: tables.Open) -> Source:
    """A source of rows."""

    def opening(read: Callable[..., Any], part: Part, columns: Columns, *shuffled: int) -> Any:
        return read(tables.open_split(part, columns, opened, RULE), part, columns, *shuffled)

    def reader(kind: Kind) -> Read | None:
        return partial(opening, kind.rows) if kind.rows else None

    return Source(name=name, fits=fits, reader=reader, stream=partial(opening, tables.stream_texts))


def _own(kind: Kind) -> Read | None:
    return partial(read_own, kind.check) if kind.check else None


def _as(**readers: Read) -> Callable[[Kind], Read | None]:
    """Readers by the name of the kind."""
    return lambda kind: readers.get(kind.name)


_BUNDLED: Mapping[str, Mapping[str, Read]] = {
    "pydoc": {"text": read_topics, "chat": read_paragraphs, "pairs": read_halves},
    "digits": {"images": read_digits},
}
BUNDLED: Mapping[str, tuple[str, ...]] = {name: (*readers,) for name, readers in _BUNDLED.items()}
"""Data that needs no download, by name, with the kinds of samples that it can give, the usual one first."""

RULE = (
    f"data.name, and what evaluation and mixture name, must be {', '.join(map(repr, BUNDLED))}, a readable file or "
    "folder, a data set on the hub, or module:function for your own"
)

SOURCES: tuple[Source, ...] = (
    Source(name="a function of your own", fits=is_path, reader=_own, gives="text, chat, pairs, images"),
    *(Source(name=name, reader=_as(**readers), gives=", ".join(readers)) for name, readers in _BUNDLED.items()),
    Source(name="a file of text", fits=is_text_file, reader=_as(text=read_lines)),
    Source(name="a folder of CIFAR-10", fits=holds_cifar10, reader=_as(images=read_cifar10)),
    _table("a file of examples", lambda name: Path(name).is_file(), tables.open_file),
    _table("a folder", lambda name: Path(name).is_dir(), tables.open_folder),
    _table("a data set on the hub", lambda name: local_path(name, RULE, own=True) is None, tables.open_on_hub),
)
"""All sources. A name means the first source that fits it and can give the kind of samples."""


def source_of(part: Part, kind: Kind) -> Source:
    """The source to read a part from.

    Raises:
        ModelError: there is no such file or folder, and it cannot be a name on the hub; or it has no data of this kind.
    """
    for source in SOURCES:
        if not source.is_named(part.name):
            continue
        if source.reader(kind):
            return source
        if not Path(part.name).exists():  # what exists may be a table, too
            readable = " or ".join(other.name for other in SOURCES if other.reader(kind))
            raise ModelError(
                f"data of kind {kind.name} must come from {readable}, got {part.name!r}, which gives {source.gives}; "
                f"take other data, or change data.kind"
            )
    raise ModelError(f"{RULE}, got {part.name!r}: neither a file nor a folder")


def read(kind: Kind, part: Part, columns: Columns) -> Any:
    """The samples of a part.

    text: a list of texts, the rows of a table, or the lines of a file with their line ends; or token ids, int32 [N].
    chat: a list of `Conversation`s, or of `ChatTokens`. Others: `Labelled` examples, which are tuples of one or two
    texts (pairs), of one list of words (tags), or `Picture`s (images).

    Raises:
        ModelError: the part cannot be read, has no such columns, or a row does not fit; the message lists all mistakes.
    """
    reader = source_of(part, kind).reader(kind)
    assert reader is not None, "source_of has seen to it"
    return reader(part, columns)


def stream_texts(kind: Kind, part: Part, columns: Columns, buffer: int, seed: int) -> tables.Rows:
    """The texts of a part or its token ids, read when they are needed, shuffled within `buffer` rows.

    Raises:
        ModelError: the part cannot be read, is no table, or has no such column.
    """
    stream = source_of(part, kind).stream
    if stream is None:
        raise ModelError(f"data.stream needs a table, a folder or a data set on the hub, got {part.name}")
    return stream(replace(part, streamed=True), columns, buffer, seed)
