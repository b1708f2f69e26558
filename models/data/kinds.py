"""The kinds of data, a class each: how a source is read, what samples that becomes, and their loss.

`data.kind` names one by its name, or a class of the user's own, which extends `Kind`, by its import path. Samples are
in `texts`, `chats`, `pairs` and `images`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from thinwire.errors import attempt
from thinwire.errors.calls import call
from thinwire.errors.imports import find, is_path
from thinwire.errors.names import did_you_mean, first_of
from thinwire.models.data import own, tables
from thinwire.models.data.chats import ChatSamples, ChatTokens, in_words
from thinwire.models.data.images import Augmentation, ImageSamples, Normalization, find_format, measure
from thinwire.models.data.pairs import PairSamples
from thinwire.models.data.parts import Columns, Conversation, Labelled, Part, evaluation_part
from thinwire.models.data.samples import Data, Samples
from thinwire.models.data.sources import read, stream_texts
from thinwire.models.data.texts import TextBlocks, TextStream
from thinwire.models.data.tokenizer import Bytes, Pretrained, make_tokenizer
from thinwire.models.errors import ModelError, require
from thinwire.models.seed import derive_seed
from thinwire.models.tasks import IGNORE, Classification, LanguageModeling, Task, TaskName

if TYPE_CHECKING:
    from thinwire.models.data.options import DataOptions

_PARTS, _PART_BYTES = 16, 2**16
"""What of each file of a stream its digest depends on."""


class Kind:
    """Examples that a function of the user's own returns as a list, or that a table holds, as samples of tokens.

    A kind says how examples are checked or read, what samples they become, and their loss.
    """

    name: str = ""
    """The name in a recipe, given by `find_kind` to a class of the user's own: its import path."""
    task: TaskName = "causal-lm"
    """What the model is loaded for."""
    columns = 1
    """The most columns of a table that are read."""
    uses: Collection[str] = ("tokenizer",)
    """The fields of `data` that only some kinds use, and this one does."""
    needs_tokenizer: str = ""
    """Which tokenizer it needs, in words; empty if bytes will do."""
    template = False
    """Whether a chat template writes the texts."""
    check: Callable[[str, Any], Any] | None = None
    """What a function returned, of this name, or a ModelError; None reads no functions."""
    rows: Callable[[Any, Part, Columns], Any] | None = None
    """The examples of an open table of `datasets`, or a ModelError; None reads no tables."""

    def objective(self, num_labels: int = 0) -> Task:
        """The loss, and the metrics that belong to it; `num_labels` is 0 where the data have none."""
        return LanguageModeling()

    def samples(self, examples: Sequence[Any], tokenizer: Bytes | Pretrained, options: DataOptions) -> Samples:
        """Numbered samples of examples."""
        raise ModelError(f"kind {self.name} must have a method samples, which makes Samples of examples; add it")

    def load(self, options: DataOptions, seed: int) -> Data:
        """The data that the options describe; `seed` decides crops and flips.

        Raises:
            ModelError: they cannot be read, or do not fit the options; the message lists all mistakes.
        """
        columns, notes = _columns(options)
        tokenizer, *parts = attempt(lambda: make_tokenizer(options.tokenizer), *self._readers(options, columns))
        parts = [part[:limit] for part, limit in zip(parts, options.limits, strict=False)]
        training, *rest = (self.samples(part, tokenizer, options) for part in _with_held_out(parts, options))
        held_out, size = rest[0] if rest else None, tokenizer.vocab_size
        return Data(training, held_out, self.objective(), vocab_size=size, notes=tuple(notes))

    def _readers(self, options: DataOptions, columns: Columns) -> list[Callable[[], Any]]:
        return [partial(read, self, part, columns) for part in _parts(options)]


class Text(Kind):
    """Texts in a row, cut into blocks of tokens."""

    name = "text"
    uses = ("tokenizer", "mixture", "stream")
    check = staticmethod(own.check_texts)
    rows = staticmethod(tables.read_texts)

    def load(self, options: DataOptions, seed: int) -> Data:
        """The data that the options describe."""
        if options.stream is not None:
            return self._stream(options, seed)
        columns, notes = _columns(options)
        tokenizer, *texts = attempt(lambda: make_tokenizer(options.tokenizer), *self._readers(options, columns))
        tokens, *rest = [
            part[:limit] if isinstance(part, Tensor) else tokenizer.tokens(part, limit)
            for part, limit in zip(texts, options.limits, strict=False)
        ]
        if not rest and options.held_out:
            cut = len(tokens) - round(len(tokens) * options.held_out)
            tokens, rest = tokens[:cut], [tokens[cut:]]
        least = options.block_size + 1
        require(
            (
                len(tokens) >= least,
                f"the training text of {options.name} must have {least} tokens or more, got {len(tokens)}; "
                + ", or ".join(
                    [*options.more_samples(), "lower data.block_size" if len(tokens) > 1 else "take other data"]
                ),
            ),
            (
                not rest or len(rest[0]) >= least,
                f"the held-out text must have {least} tokens or more, got {len(rest[0]) if rest else 0}; "
                + ", or ".join([*options.more_samples(held_out=True), "lower data.block_size"]),
            ),
        )
        held_out = TextBlocks(rest[0], options.block_size) if rest else None
        sizes = [int(part.max()) + 1 if isinstance(part, Tensor) else tokenizer.vocab_size for part in texts]
        return Data(
            TextBlocks(tokens, options.block_size),
            held_out,
            self.objective(),
            vocab_size=max(sizes),
            notes=tuple(notes),
        )

    def _stream(self, options: DataOptions, seed: int) -> Data:
        training, *evaluation = _parts(options)
        columns, notes = _columns(options)
        buffer, limit, size = options.stream, options.limit, options.block_size
        assert buffer is not None and limit is not None, "the options are checked"
        tokenizer, rows, *rest = attempt(
            lambda: make_tokenizer(options.tokenizer),
            lambda: stream_texts(self, training, columns, buffer, seed),
            *(partial(read, self, part, columns) for part in evaluation),
        )
        tokens = partial(_tokens, tokenizer)
        told = repr((training, options.columns, options.tokenizer, buffer, limit, seed, _files(Path(options.name))))
        return Data(
            TextStream(rows, tokens, (limit - 1) // size, size, told),
            TextBlocks(tokens(rest[0])[: options.limits[1]], size) if rest else None,
            self.objective(),
            vocab_size=tokenizer.vocab_size,
            notes=tuple(notes),
        )


class Chat(Kind):
    """Conversations, of which answers count, written by the tokenizer's chat template."""

    name = "chat"
    columns = 3
    uses = ("tokenizer", "mixture", "date", "packing")
    needs_tokenizer = "that of a model with a chat template"
    template = True
    check = staticmethod(own.check_chats)
    rows = staticmethod(tables.read_chats)

    def load(self, options: DataOptions, seed: int) -> Data:
        """The data that the options describe."""
        columns, notes = _columns(options)
        tokenizer, *parts = attempt(
            lambda: Pretrained(options.tokenizer, options.date), *self._readers(options, columns)
        )
        given = (each.tokens for part in parts for each in part if isinstance(each, ChatTokens))
        sizes = [tokenizer.vocab_size, *(int(tokens.max()) + 1 for tokens in given if len(tokens))]
        names = (options.name, options.evaluation or "")
        made = [
            tokenizer.chats(chats[:limit], name, columns.report)
            if isinstance(chats[0], Conversation)
            else chats[:limit]
            for chats, limit, name in zip(parts, options.limits, names, strict=False)
        ]
        made = _with_held_out(made, options)
        samples, *held = (
            ChatSamples(part, options.block_size, tokenizer.padding, packing=options.packing) for part in made
        )
        said = in_words([(tokenizer.decode(tokens.tolist()), counts) for tokens, counts in samples.first()])
        return Data(
            samples,
            held[0] if held else None,
            self.objective(),
            vocab_size=max(sizes),
            date=tokenizer.date,
            ends=frozenset().union(*(each.ends for part in made for each in part)),
            notes=(
                *notes,
                *samples.notes(),
                f"the first conversation, where the loss counts what is in [[ ]]:\n{said}",
            ),
        )


class Labelling(Kind):
    """Texts, each with a label or with one for each word."""

    task: TaskName = "classification"
    uses = ("tokenizer", "label")
    of: Literal["sample", "word"] = "sample"
    """What has a label."""

    def objective(self, num_labels: int = 0) -> Task:
        """Classes of samples, or of words."""
        return Classification(num_labels, self.of)

    def load(self, options: DataOptions, seed: int) -> Data:
        """The data that the options describe."""
        columns, notes = _columns(options)
        tokenizer, parts = attempt(lambda: make_tokenizer(options.tokenizer), lambda: _labelled(options, columns))

        def samples(part: Labelled) -> PairSamples:
            padded = tokenizer.padded(part.examples, options.block_size)
            if padded.words is None:
                return PairSamples(padded, part.labels)
            words = padded.words.long()
            return PairSamples(padded, torch.where(words < 0, IGNORE, part.labels.gather(1, words.clamp(min=0))))

        (training, *_), (trained, *held) = parts, map(samples, parts)
        return Data(
            trained,
            held[0] if held else None,
            self.objective(training.num_labels),
            num_labels=training.num_labels,
            vocab_size=tokenizer.padded_vocab_size,
            classes=training.classes,
            notes=(*trained.notes(), *notes),
        )


class Pairs(Labelling):
    """A text or two, and their class."""

    name = "pairs"
    columns = 2
    check = staticmethod(own.check_pairs)
    rows = staticmethod(tables.read_pairs)


class Tags(Labelling):
    """Words, each with a tag."""

    name = "tags"
    task, of = "token-classification", "word"
    needs_tokenizer = "that of a model"
    rows = staticmethod(tables.read_tags)


class Images(Kind):
    """Images, and their class."""

    name = "images"
    task = "classification"
    uses = ("label", "image_size", "channels", "mean", "std", "crop", "flip")
    check = staticmethod(own.check_pictures)
    rows = staticmethod(tables.read_pictures)

    def objective(self, num_labels: int = 0) -> Task:
        """Classes of samples."""
        return Classification(num_labels)

    def load(self, options: DataOptions, seed: int) -> Data:
        """The data that the options describe."""
        columns, notes = _columns(options)
        training, *held = parts = _labelled(options, columns)
        form = find_format(parts, options.channels, options.image_size)
        given = Normalization(tuple(options.mean), tuple(options.std))
        normalization = given if options.mean else measure(training, form)
        if len(normalization.mean) != form.channels:
            raise ModelError(
                f"mean and std must have a value for each of {form.channels} channels, got {len(options.mean)}"
            )
        changes = options.crop or options.flip
        augmentation = Augmentation(options.crop, options.flip, seed) if changes else None
        measured = (
            f"pixels are normalised by mean {list(normalization.mean)} and std {list(normalization.std)}, measured"
        )
        return Data(
            ImageSamples(training, form, normalization, augmentation),
            ImageSamples(held[0], form, normalization) if held else None,
            self.objective(training.num_labels),
            num_labels=training.num_labels,
            classes=training.classes,
            notes=(*([] if options.mean else [measured]), *notes),
        )


KINDS: Mapping[str, Kind] = {each.name: each for each in (Text(), Chat(), Pairs(), Tags(), Images())}
"""The kinds that are named by one word."""
_TAKES = {
    "check": "the name of a function and what it returned",
    "rows": "a table, its part and the columns",
    "samples": "examples, a tokenizer and the options",
}
"""What methods of a class of the user's own take, in words."""


def find_kind(name: str) -> Kind:
    """The kind of a name, or of the user's own class at `module:class`. ModelError if there is none."""
    if name in KINDS:
        return KINDS[name]
    known = ("auto", *KINDS)
    rule = f"kind must be {', '.join(known)}, or module:class for your own"
    require((is_path(name), f"{rule}, got {name}{did_you_mean(name, known)}"))
    found = find(name, ModelError, "kind")
    if not (isinstance(found, type) and issubclass(found, Kind)):
        raise ModelError(f"kind must be a class that extends thinwire.models.data.kinds.Kind, got {name}")
    kind: Kind = call(found, name=name, takes="no arguments", error=ModelError)
    kind.name = name
    reads = kind.check is not None or kind.rows is not None or found.load is not Kind.load
    require((reads, f"kind {name} must have a method check, for functions, or rows, for tables; add one to the class"))
    for method, takes in _TAKES.items():
        if getattr(found, method) is not getattr(Kind, method):
            own_method = partial(call, getattr(kind, method), name=f"{name}.{method}", takes=takes, error=ModelError)
            setattr(kind, method, own_method)
    return kind


def _parts(options: DataOptions) -> list[Part]:
    """What is read to train on, and then what is named for evaluation."""
    training = Part(options.name, options.split, options.subset)
    return [training, *([evaluation_part(training, options.evaluation)] if options.evaluation else [])]


def _columns(options: DataOptions) -> tuple[Columns, Collection[str]]:
    """The columns to read, and the sentences that their readers will say about them, once each."""
    notes: dict[str, None] = {}
    return Columns(options.columns, options.label, lambda note: notes.update({note: None})), notes.keys()


def _labelled(options: DataOptions, columns: Columns) -> list[Labelled]:
    """The examples to train on and, if there are any, those to evaluate on."""
    training, *rest = attempt(*(partial(read, options.chosen_kind, part, columns) for part in _parts(options)))
    unused = sorted({*range(training.num_labels)} - {*training.labels.unique().tolist()})
    if unused and not training.classes:
        columns.report(
            f"no sample of {options.name} has label {first_of([*map(str, unused)])}, and there are "
            f"{training.num_labels} classes, numbered from 0"
        )
    training, *rest = [
        part.select(range(min(len(part), limit or len(part))))
        for part, limit in zip((training, *rest), options.limits, strict=False)
    ]
    if rest:
        evaluation = rest[0].numbered_as(training)
        if evaluation.classes != training.classes:  # by name they would be the same
            named, other = (options.name, options.evaluation)[:: 1 if training.classes else -1]
            first = enumerate((training.classes or evaluation.classes)[:2])
            told = ", ".join(f"{number} is {name}" for number, name in first)
            columns.report(f"{named} names its classes and {other} does not, so they are taken by number: {told}")
        return [training, evaluation]
    return _with_held_out([training], options)


def _with_held_out(parts: list[Any], options: DataOptions) -> list[Any]:
    """Examples to train on, and for evaluation: of a single part the share that is held out, the same in every run."""
    if parts[1:] or not options.held_out:
        return parts
    [whole], share = parts, options.held_out
    total, count = len(whole), round(len(whole) * share)
    if not 1 <= count < total:
        raise ModelError(
            f"held_out must leave at least one sample to train on and one to evaluate, got {share} of {total} samples"
        )
    # sources are often sorted by class, so the last samples could all be of one class
    generator = torch.Generator().manual_seed(derive_seed("held out"))
    order = torch.randperm(total, generator=generator)
    drawn = [ids.sort().values.tolist() for ids in (order[count:], order[:count])]
    return [whole.select(ids) if isinstance(whole, Labelled) else [whole[i] for i in ids] for ids in drawn]


def _files(place: Path) -> list[tuple[str, int, str]]:
    """The files of a path, their sizes and digests of parts; none of a name on the hub."""
    files = [path for path in sorted([place, *place.rglob("*")]) if path.is_file()]
    return [(str(path.relative_to(place)), path.stat().st_size, _digest_of_parts(path)) for path in files]


def _digest_of_parts(path: Path) -> str:
    """The SHA-256 of parts that are spread over a file, from its first byte to its last: of 1 MiB, all of it."""
    size, hashed = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        for start in range(0, size, max(_PART_BYTES, -((_PART_BYTES - size) // (_PARTS - 1)))):
            file.seek(start)
            hashed.update(file.read(_PART_BYTES))
    return hashed.hexdigest()


def _tokens(tokenizer: Bytes | Pretrained, texts: Sequence[str] | Tensor) -> Tensor:
    """The tokens of texts, or token ids as they are. ModelError if one is beyond the tokenizer's."""
    if not isinstance(texts, Tensor):
        return tokenizer.tokens(texts)
    size, largest = tokenizer.vocab_size, int(texts.max()) if len(texts) else 0
    require((largest < size, f"token ids of a stream must be below the {size} of data.tokenizer, got {largest}"))
    return texts
