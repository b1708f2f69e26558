"""Loading the data of a run: read it, make numbered samples, keep some for evaluation, add the task.

Every process loads the data and goes through the same ids. Only the first stage reads inputs, only the last reads
targets. The three kinds of samples are in `texts`, `pairs` and `images`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from thinwire.errors import attempt
from thinwire.errors.names import first_of
from thinwire.models.data.chats import ChatSamples, ChatTokens, in_words
from thinwire.models.data.images import Augmentation, ImageSamples, Normalization, find_format, measure
from thinwire.models.data.mixture import mix
from thinwire.models.data.options import BYTES, DataOptions
from thinwire.models.data.pairs import PairSamples
from thinwire.models.data.parts import Columns, Conversation, Kind, Labelled, Part, evaluation_part, is_split
from thinwire.models.data.samples import Data, Samples
from thinwire.models.data.sources import read, source_of, stream_texts
from thinwire.models.data.templates import today
from thinwire.models.data.texts import TextBlocks, TextStream
from thinwire.models.data.tokenizer import Bytes, Pretrained, make_tokenizer
from thinwire.models.errors import ModelError, require
from thinwire.models.seed import derive_seed
from thinwire.models.tasks import IGNORE, Classification, LanguageModeling

_PARTS, _PART_BYTES = 16, 2**16
"""What of each file of a stream its digest depends on."""


def load(options: DataOptions, *, seed: int = 0) -> Data:
    """Read the data. `seed` decides crops and flips only.

    Raises:
        ModelError: the data cannot be read, or do not fit the options; the message lists all mistakes.
    """
    _require_rows(options)
    data = _load_mixture(options, seed) if options.mixture else _LOADERS[options.chosen_kind](options, seed)
    if not options.mixture:
        _require_one_tokenizer(options, {options.name: data})
    notes = list(data.notes)
    if options.date != data.date and options.date:
        notes.append(f"data.date, {options.date}, does nothing, because the chat template asks for no date")
    if options.evaluation and options.held_out not in (0, DataOptions.held_out):
        notes.append(f"data.held_out, {options.held_out}, does nothing, because data.evaluation names what is held out")
    if data.held_out is not None and data.held_out.digest == data.training.digest:
        notes.append(
            "the samples for evaluation are those to train on; name others by data.evaluation to see what a model "
            "learned"
        )
    return replace(data, notes=tuple(notes))


def _load_mixture(options: DataOptions, seed: int) -> Data:
    kind = options.chosen_kind
    names = [options.name, *options.mixture]
    day = options.date or (today() if kind == "chat" else None)
    first = replace(options, kind=kind, mixture={}, date=day)
    once = options.evaluation is not None and not is_split(options.evaluation)  # of no source, so the first reads it
    later = replace(first, evaluation=None, evaluation_limit=None, held_out=0) if once else first
    each = [first, *(replace(later, name=name) for name in options.mixture)]
    parts = attempt(*(partial(_load_entry, entry, seed) for entry in each))
    shares = [1 - sum(options.mixture.values()), *options.mixture.values()]
    sources = dict(zip(names, parts, strict=True))
    _require_one_tokenizer(options, sources)
    return mix(sources, shares)


def _require_rows(options: DataOptions) -> None:
    """Raise ModelError for fields about tables, which do nothing where no source is one."""
    trained = [options.name, *options.mixture]
    named = [options.evaluation] if options.evaluation and not is_split(options.evaluation) else []
    folders = [name for name in trained if not Path(name).is_file()]
    columns, label = "tables have columns", "tables have labels in a column"
    subset = "folders and data sets on the hub have subsets"
    require(
        *(
            (
                any(source_of(Part(name), options.chosen_kind).stream for name in names),
                f"{field} must be {usual} for {options.name}, because only {have}, got {value}",
            )
            for field, value, unset, usual, names, have in (
                ("columns", options.columns, [], "[]", [*trained, *named], columns),
                ("label", options.label, "label", "label", [*trained, *named], label),
                ("subset", options.subset, None, "null", folders, subset),
            )
            if value != unset
        )
    )


def _require_one_tokenizer(options: DataOptions, sources: Mapping[str, Data]) -> None:
    """Raise ModelError for token ids beside texts whose tokens are bytes: alike numbers mean other text there."""
    parts = [(name, data.training) for name, data in sources.items()]
    parts += [(options.evaluation or name, data.held_out) for name, data in sources.items() if data.held_out]
    forms = {part.tokens.dtype: name for name, part in parts if isinstance(part, TextBlocks)}
    if len(forms) == 2:  # other tokenizers make tokens of the type of token ids
        raise ModelError(
            f"data.tokenizer must be that of the token ids of {forms[torch.int32]}, because {forms[torch.uint8]} is "
            f"text, got {BYTES!r}"
        )


def _load_entry(options: DataOptions, seed: int) -> Data:
    """One source of a mixture. A mistake that names no source is told with the name of this one."""
    try:
        return _LOADERS[options.chosen_kind](options, seed)
    except ModelError as error:
        named = (options.name, options.evaluation or options.name)
        told = (each if any(name in each for name in named) else f"{options.name}: {each}" for each in error.mistakes)
        raise ModelError(told) from error


def without_texts(options: DataOptions, vocab_size: int, count: int) -> Data:
    """Data for a language model in the shape that the options say, but of `count` samples of zeros, which nobody reads.

    Raises:
        ModelError: the options are for other data.
    """
    require_language(options)
    length = options.block_size
    samples: Samples
    if options.chosen_kind == "text":
        samples = TextBlocks(torch.zeros(count * length + 1, dtype=torch.uint8), length)
    else:
        one = ChatTokens(torch.zeros(length, dtype=torch.int32), torch.ones(length, dtype=torch.bool))
        samples = ChatSamples([one] * count, length, 0, packing=options.packing)
    return Data(samples, samples, LanguageModeling(), vocab_size=vocab_size)


def require_language(options: DataOptions) -> None:
    """Raise ModelError unless data are for a language model, which writes text."""
    kind = options.chosen_kind
    require(
        (kind in ("text", "chat"), f"only a language model answers prompts, and data of kind {kind} are for others")
    )


def more_samples(options: DataOptions, *, held_out: bool = False) -> list[str]:
    """What a user can change to get more samples."""
    own = held_out and options.evaluation_limit is not None
    name, limit = ("evaluation_limit", options.limits[1]) if own else ("limit", options.limit)
    limited = [] if limit is None else [f"raise data.{name}, which is {limit}"]
    shared = ["raise data.held_out"] if held_out and not options.evaluation else []
    return [*limited, *shared]


def _load_stream(options: DataOptions, seed: int) -> Data:
    training, *evaluation = _parts(options)
    columns, notes = _columns(options)
    buffer, limit, size = options.stream, options.limit, options.block_size
    assert buffer is not None and limit is not None, "the options are checked"
    tokenizer, rows, *rest = attempt(
        lambda: make_tokenizer(options.tokenizer),
        lambda: stream_texts(training, columns, buffer, seed),
        *(partial(read, "text", part, columns) for part in evaluation),
    )
    tokens = partial(_tokens, tokenizer)
    told = repr((training, options.columns, options.tokenizer, buffer, limit, seed, _files(Path(options.name))))
    return Data(
        TextStream(rows, tokens, (limit - 1) // size, size, told),
        TextBlocks(tokens(rest[0])[: options.limits[1]], size) if rest else None,
        LanguageModeling(),
        vocab_size=tokenizer.vocab_size,
        notes=tuple(notes),
    )


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


def _load_text(options: DataOptions, seed: int) -> Data:
    if options.stream is not None:
        return _load_stream(options, seed)
    columns, notes = _columns(options)
    tokenizer, *texts = attempt(
        lambda: make_tokenizer(options.tokenizer), *(partial(read, "text", part, columns) for part in _parts(options))
    )
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
            + ", or ".join([*more_samples(options), "lower data.block_size" if len(tokens) > 1 else "take other data"]),
        ),
        (
            not rest or len(rest[0]) >= least,
            f"the held-out text must have {least} tokens or more, got {len(rest[0]) if rest else 0}; "
            + ", or ".join([*more_samples(options, held_out=True), "lower data.block_size"]),
        ),
    )
    held_out = TextBlocks(rest[0], options.block_size) if rest else None
    sizes = [int(part.max()) + 1 if isinstance(part, Tensor) else tokenizer.vocab_size for part in texts]
    return Data(
        TextBlocks(tokens, options.block_size), held_out, LanguageModeling(), vocab_size=max(sizes), notes=tuple(notes)
    )


def _load_chat(options: DataOptions, seed: int) -> Data:
    columns, notes = _columns(options)
    tokenizer, *parts = attempt(
        lambda: Pretrained(options.tokenizer, options.date),
        *(partial(read, "chat", part, columns) for part in _parts(options)),
    )
    given = (each.tokens for part in parts for each in part if isinstance(each, ChatTokens))
    sizes = [tokenizer.vocab_size, *(int(tokens.max()) + 1 for tokens in given if len(tokens))]
    names = (options.name, options.evaluation or "")
    training, *rest = [
        tokenizer.chats(chats[:limit], name, columns.report) if isinstance(chats[0], Conversation) else chats[:limit]
        for chats, limit, name in zip(parts, options.limits, names, strict=False)
    ]
    if not rest and options.held_out:
        ids, held_out = _divided(len(training), options.held_out)
        training, rest = [training[index] for index in ids], [[training[index] for index in held_out]]
    samples, *held = (
        ChatSamples(part, options.block_size, tokenizer.padding, packing=options.packing) for part in (training, *rest)
    )
    said = in_words([(tokenizer.decode(tokens.tolist()), counts) for tokens, counts in samples.first()])
    return Data(
        samples,
        held[0] if held else None,
        LanguageModeling(),
        vocab_size=max(sizes),
        date=tokenizer.date,
        ends=frozenset().union(*(each.ends for part in (training, *rest) for each in part)),
        notes=(*notes, *samples.notes(), f"the first conversation, where the loss counts what is in [[ ]]:\n{said}"),
    )


def _load_labelled_texts(options: DataOptions, seed: int) -> Data:
    columns, notes = _columns(options)
    tokenizer, (training, held_out) = attempt(
        lambda: make_tokenizer(options.tokenizer), lambda: _labelled(options, columns)
    )

    def samples(part: Labelled) -> PairSamples:
        padded = tokenizer.padded(part.examples, options.block_size)
        if padded.words is None:
            return PairSamples(padded, part.labels)
        words = padded.words.long()
        return PairSamples(padded, torch.where(words < 0, IGNORE, part.labels.gather(1, words.clamp(min=0))))

    trained = samples(training)
    return Data(
        trained,
        samples(held_out) if held_out else None,
        Classification(training.num_labels, "word" if options.chosen_kind == "tags" else "sample"),
        num_labels=training.num_labels,
        vocab_size=tokenizer.padded_vocab_size,
        classes=training.classes,
        notes=(*trained.notes(), *notes),
    )


def _load_images(options: DataOptions, seed: int) -> Data:
    columns, notes = _columns(options)
    training, held_out = _labelled(options, columns)
    parts = [training, *([held_out] if held_out else [])]
    form = find_format(parts, options.channels, options.image_size)
    given = Normalization(tuple(options.mean), tuple(options.std))
    normalization = given if options.mean else measure(training, form)
    require(
        (
            len(normalization.mean) == form.channels,
            f"mean and std must have a value for each of {form.channels} channels, got {len(options.mean)}",
        )
    )
    changes = options.crop or options.flip
    augmentation = Augmentation(options.crop, options.flip, seed) if changes else None
    measured = f"pixels are normalised by mean {list(normalization.mean)} and std {list(normalization.std)}, measured"
    return Data(
        ImageSamples(training, form, normalization, augmentation),
        ImageSamples(held_out, form, normalization) if held_out else None,
        Classification(training.num_labels),
        num_labels=training.num_labels,
        classes=training.classes,
        notes=(*([] if options.mean else [measured]), *notes),
    )


_LOADERS: dict[Kind, Callable[[DataOptions, int], Data]] = {
    "text": _load_text,
    "chat": _load_chat,
    "pairs": _load_labelled_texts,
    "tags": _load_labelled_texts,
    "images": _load_images,
}


def _parts(options: DataOptions) -> list[Part]:
    """What is read to train on, and then what is named for evaluation."""
    training = Part(options.name, options.split, options.subset)
    return [training, *([evaluation_part(training, options.evaluation)] if options.evaluation else [])]


def _columns(options: DataOptions) -> tuple[Columns, Collection[str]]:
    """The columns to read, and the sentences that their readers will say about them, once each."""
    notes: dict[str, None] = {}
    return Columns(options.columns, options.label, lambda note: notes.update({note: None})), notes.keys()


def _labelled(options: DataOptions, columns: Columns) -> tuple[Labelled, Labelled | None]:
    """The examples to train on and those to evaluate on."""
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
        return training, evaluation
    if not options.held_out:
        return training, None
    ids, held_out = _divided(len(training), options.held_out)
    return training.select(ids), training.select(held_out)


def _divided(total: int, share: float) -> tuple[list[int], list[int]]:
    """The samples to train on and those to evaluate on, drawn the same way in every run."""
    count = round(total * share)
    require(
        (
            1 <= count < total,
            f"held_out must leave at least one sample to train on and one to evaluate, got {share} of {total} samples",
        )
    )
    # sources are often sorted by class, so the last samples could all be of one class
    generator = torch.Generator().manual_seed(derive_seed("held out"))
    order = torch.randperm(total, generator=generator)
    return order[count:].sort().values.tolist(), order[:count].sort().values.tolist()
