"""Loading the data of a run: read it, make numbered samples, keep some for evaluation, add the task.

Every process loads the data and goes through the same ids. Only the first stage reads inputs, only the last reads
targets. What samples are is said by the kind of data, in `kinds`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from thinwire.errors import attempt
from thinwire.models.data.chats import ChatSamples, ChatTokens
from thinwire.models.data.mixture import mix
from thinwire.models.data.options import DataOptions
from thinwire.models.data.parts import BYTES, Part, is_split
from thinwire.models.data.samples import Data, Samples
from thinwire.models.data.sources import source_of
from thinwire.models.data.templates import today
from thinwire.models.data.texts import TextBlocks
from thinwire.models.errors import ModelError, require
from thinwire.models.tasks import LanguageModeling


def load(options: DataOptions, *, seed: int = 0) -> Data:
    """Read the data. `seed` decides crops and flips only.

    Raises:
        ModelError: the data cannot be read, or do not fit the options; the message lists all mistakes.
    """
    _require_rows(options)
    data = _load_mixture(options, seed) if options.mixture else options.chosen_kind.load(options, seed)
    if not options.mixture:
        _require_one_tokenizer(options, {options.name: data})
    notes = list(data.notes)
    if options.date != data.date and options.date:
        notes.append(f"data.date, {options.date}, does nothing, because the chat template asks for no date")
    if options.evaluation and options.held_out not in (0, DataOptions.held_out):
        notes.append(f"data.held_out, {options.held_out}, does nothing, because data.evaluation names what is held out")
    if data.held_out_digest == data.training.digest:
        notes.append(
            "the samples for evaluation are those to train on; name others by data.evaluation to see what a model "
            "learned"
        )
    return replace(data, notes=tuple(notes))


def _load_mixture(options: DataOptions, seed: int) -> Data:
    kind = options.chosen_kind
    names = [options.name, *options.mixture]
    day = options.date or (today() if kind.template else None)
    first = replace(options, mixture={}, date=day)
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
        return options.chosen_kind.load(options, seed)
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
    if not options.chosen_kind.template:
        samples = TextBlocks(torch.zeros(count * length + 1, dtype=torch.uint8), length)
    else:
        one = ChatTokens(torch.zeros(length, dtype=torch.int32), torch.ones(length, dtype=torch.bool))
        samples = ChatSamples([one] * count, length, 0, packing=options.packing)
    return Data(samples, samples, LanguageModeling(), vocab_size=vocab_size)


def require_language(options: DataOptions) -> None:
    """Raise ModelError unless data are for a language model, which writes text."""
    kind = options.chosen_kind
    told = f"only a language model answers prompts, and data of kind {kind.name} are for others"
    require((kind.task == "causal-lm", told))
