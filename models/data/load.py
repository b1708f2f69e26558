"""The data of a run: what the options name, read, cut into numbered samples, split, and joined with its task.

Every stage's process loads it and walks the same ids; only the first reads inputs, only the last targets. `texts`,
`pairs` and `images` hold the three kinds of samples, `sources` and `tokenizer` what they are made from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from thinwire.errors import attempt
from thinwire.models.data.images import MODES, Augmentation, ImageSamples, Normalization, find_format, measure
from thinwire.models.data.pairs import PairSamples
from thinwire.models.data.sampler import Shuffle
from thinwire.models.data.sources import (
    DIGITS,
    PYDOC,
    Labelled,
    Place,
    check_labels,
    evaluation_place,
    read_pairs,
    read_pictures,
    read_texts,
)
from thinwire.models.data.texts import TextBlocks
from thinwire.models.data.tokenizer import BYTES, make_tokenizer
from thinwire.models.errors import require
from thinwire.models.seed import derive_seed
from thinwire.models.tasks import Classification, LanguageModeling, Task

Kind = Literal["text", "pairs", "images"]
_BUNDLED: dict[str, tuple[Kind, ...]] = {PYDOC: ("text", "pairs"), DIGITS: ("images",)}
"""What comes without a download, and the kinds it can be, the usual one first."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What is trained on, and how it becomes samples."""

    name: str = PYDOC
    """"pydoc" (the documentation that comes with Python, half a megabyte of English) or "digits" (scikit-learn's 1797
    handwritten ones); the path of a text, parquet, JSON (an object a line) or CSV file, or of a folder of text, tables
    or images; a data set on the Hugging Face hub; or module:function, a function of your own that takes a split."""
    kind: Literal["auto", "text", "pairs", "images"] = "auto"
    """Whether text is continued, or one text or a pair of texts or an image is classified. "auto" is images for
    "digits", else text."""
    subset: str | None = None
    """The configuration of a data set that has several: cola, qnli, wikitext-2-raw-v1."""
    split: str = "train"
    """The part that is trained on."""
    evaluation: str | None = None
    """What is kept for evaluation: a word is another split of the data, else it is a path ("./test"); null takes
    `held_out` instead."""
    held_out: float = 0.1
    """The fraction of the training part that is kept for evaluation, where `evaluation` names nothing: of text its end,
    else samples chosen once and for all; 0 keeps none."""
    limit: int | None = None
    """How much of each part is used, from its start: tokens of text, else samples; null uses all."""
    columns: list[str] = field(default_factory=list)
    """The columns of a table that are read; empty takes those of the right type (of text the one called "text")."""
    label: str = "label"
    """The column with the class, an integer."""
    tokenizer: str = BYTES
    """"bytes", or the name or folder of a tokenizer that transformers can load."""
    block_size: int = 128
    """The tokens of one sample: of text a block, of pairs the length they are cut or padded to."""
    shuffle: Shuffle = "epoch"
    """When samples get a new random order: every "epoch", "once" for all of them, or "never"."""
    image_size: int | None = None
    """The height and width images are scaled to; null leaves them, and all must have one size."""
    channels: int | None = None
    """1 for grey images, 3 for colour; null takes grey if all are."""
    mean: list[float] = field(default_factory=list)
    """Subtracted from pixels in [0, 1], by channel; empty measures a thousand training images."""
    std: list[float] = field(default_factory=list)
    """What that is divided by, by channel; given or left out together with `mean`."""
    crop: int = 0
    """Black pixels put around a training image before a random part of the original size is cut out; 0 does not."""
    flip: bool = False
    """Whether every other training image is mirrored, at random."""

    def __post_init__(self) -> None:
        kind, bundled = self.chosen_kind, _BUNDLED.get(self.name, (self.chosen_kind,))
        for_images = {
            "image_size": self.image_size,
            "channels": self.channels,
            "mean": self.mean,
            "std": self.std,
            "crop": self.crop,
            "flip": self.flip,
        }
        misplaced = ", ".join(name for name, value in for_images.items() if value and kind != "images")
        most = 2 if kind == "pairs" else 1
        fitting = (0, self.channels) if self.channels else (0, *MODES)
        sized = len(self.mean) == len(self.std) and len(self.mean) in fitting
        require(
            (bool(self.name), f"name must be {PYDOC!r}, {DIGITS!r}, a path or a data set on the hub, got ''"),
            (kind in bundled, f"{self.name} is of kind {' or '.join(bundled)}, got {self.kind!r}"),
            (self.evaluation != "", "evaluation must be a split, a path or null, got ''"),
            (0 <= self.held_out < 1, f"held_out must lie in [0, 1), got {self.held_out}"),
            (self.limit is None or self.limit >= 1, f"limit must be at least 1, got {self.limit}"),
            (len(self.columns) <= most, f"columns must be at most {most} for kind {kind}, got {self.columns}"),
            (self.block_size >= 1, f"block_size must be at least 1, got {self.block_size}"),
            (not misplaced, f"{misplaced} must be left out for kind {kind}: only images have them"),
            (self.image_size is None or self.image_size >= 1, f"image_size must be at least 1, got {self.image_size}"),
            (self.channels in (None, *MODES), f"channels must be 1 or 3, got {self.channels}"),
            (
                sized and all(value > 0 for value in self.std),
                f"mean and std must have a value for each channel, std's above 0, got {self.mean} and {self.std}",
            ),
            (self.crop >= 0, f"crop must be at least 0, got {self.crop}"),
        )

    @property
    def chosen_kind(self) -> Kind:
        """The kind, "auto" decided."""
        return _BUNDLED.get(self.name, ("text",))[0] if self.kind == "auto" else self.kind


class Samples(Protocol):
    """Numbered samples: ids are 0..len - 1, and mean the same in every process and epoch."""

    digest: str
    """SHA-256, in hex, of all that samples are made from, for stages that must make sure they read the same."""

    def __len__(self) -> int:
        """How many samples there are."""

    def inputs(self, ids: Tensor, epoch: int = 0) -> Tensor:
        """What the first stage reads, for int64 ids [B]: tokens int64 [B, T], or pixels float32 [B, C, H, W]."""

    def targets(self, ids: Tensor) -> Tensor:
        """What the loss compares with: int64 [B, T] or [B]."""

    def side(self, ids: Tensor) -> dict[str, Tensor]:
        """What any stage may read by sample id: attention_mask and token_type_ids, int64 [B, T], of pairs."""

    def example(self, batch: int) -> Tensor:
        """The inputs of so many samples, without data: a meta tensor."""

    def side_example(self, batch: int) -> dict[str, Tensor]:
        """The side inputs of so many samples, without data."""


@dataclass(frozen=True)
class Data:
    """All that a run must know of its data."""

    training: Samples
    held_out: Samples | None
    task: Task
    num_labels: int | None = None
    """The classes to tell apart; None for text."""
    vocab_size: int | None = None
    """One more than the largest token the tokenizer can give; None for images."""
    notes: tuple[str, ...] = ()
    """Sentences for people at the start of a run."""


def load(options: DataOptions, *, seed: int = 0) -> Data:
    """Read the data. `seed` is that of crops and flips alone.

    Raises:
        ModelError: if it cannot be read, or cannot be what the options say; with every mistake that can be told.
    """
    return _LOADERS[options.chosen_kind](options, seed)


def more_samples(options: DataOptions, *, held_out: bool = False) -> list[str]:
    """What to change for more samples of a part, the option that took most away first."""
    limited = [] if options.limit is None else [f"raise data.limit, which is {options.limit}"]
    shared = ["raise data.held_out"] if held_out and not options.evaluation else []
    return [*limited, *shared]


def _load_text(options: DataOptions, seed: int) -> Data:
    training, evaluation = _places(options)
    tokenizer, *texts = attempt(
        lambda: make_tokenizer(options.tokenizer),
        *(_reader(read_texts, place, options.columns) for place in (training, evaluation) if place),
    )
    tokens, *rest = [tokenizer.tokens(part, options.limit) for part in texts]
    if not rest and options.held_out:
        cut = len(tokens) - round(len(tokens) * options.held_out)
        tokens, rest = tokens[:cut], [tokens[cut:]]
    least = options.block_size + 1
    require(
        (
            len(tokens) >= least,
            f"the training text must have {least} tokens or more, got {len(tokens)}; "
            + ", or ".join([*more_samples(options), "lower data.block_size"]),
        ),
        (
            not rest or len(rest[0]) >= least,
            f"the held-out text must have {least} tokens or more, got {len(rest[0]) if rest else 0}; "
            + ", or ".join([*more_samples(options, held_out=True), "lower data.block_size"]),
        ),
    )
    held_out = TextBlocks(rest[0], options.block_size) if rest else None
    return Data(TextBlocks(tokens, options.block_size), held_out, LanguageModeling(), vocab_size=tokenizer.vocab_size)


def _load_pairs(options: DataOptions, seed: int) -> Data:
    tokenizer, (training, held_out) = attempt(
        lambda: make_tokenizer(options.tokenizer), lambda: _labelled(options, read_pairs)
    )

    def samples(part: Labelled) -> PairSamples:
        return PairSamples(tokenizer.padded(part.examples, options.block_size), part.labels)

    trained = samples(training)
    return Data(
        trained,
        samples(held_out) if held_out else None,
        Classification(training.num_labels),
        num_labels=training.num_labels,
        vocab_size=tokenizer.padded_vocab_size,
        notes=trained.notes(),
    )


def _load_images(options: DataOptions, seed: int) -> Data:
    training, held_out = _labelled(options, read_pictures)
    pictures = [*training.examples, *(held_out.examples if held_out else ())]
    form = find_format(pictures, options.channels, options.image_size)
    given = Normalization(tuple(options.mean), tuple(options.std))
    normalization = given if options.mean else measure(training.examples, form)
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
        notes=() if options.mean else (measured,),
    )


_LOADERS: dict[Kind, Callable[[DataOptions, int], Data]] = {
    "text": _load_text,
    "pairs": _load_pairs,
    "images": _load_images,
}


def _places(options: DataOptions) -> tuple[Place, Place | None]:
    training = Place(options.name, options.split, options.subset)
    return training, evaluation_place(training, options.evaluation) if options.evaluation else None


def _reader(read: Callable[..., object], *arguments: object) -> Callable[[], object]:
    return lambda: read(*arguments)


def _labelled(options: DataOptions, read: Callable[..., Labelled]) -> tuple[Labelled, Labelled | None]:
    """Return the examples to train on and those to evaluate on."""
    places = [place for place in _places(options) if place]
    training, *rest = attempt(*(_reader(read, place, options.columns, options.label) for place in places))
    training, *rest = [part.select(range(min(len(part), options.limit or len(part)))) for part in (training, *rest)]
    if rest:
        check_labels(rest[0].labels, training.num_labels, "the evaluation data; the training data has no such class")
        return training, rest[0]
    if not options.held_out:
        return training, None
    count = round(len(training) * options.held_out)
    require(
        (
            1 <= count < len(training),
            f"held_out must leave a sample on both sides, got {options.held_out} of {len(training)}",
        )
    )
    # sources are often sorted by class, so an end of them would be one class
    generator = torch.Generator().manual_seed(derive_seed("held out"))
    order = torch.randperm(len(training), generator=generator)
    return training.select(order[count:].sort().values.tolist()), training.select(order[:count].sort().values.tolist())
