"""What a user can choose about data: the fields of a recipe's `data`, with their checks.

Large libraries are imported inside the checks, so `thinwire train --help` needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Literal

from thinwire.errors.imports import is_path
from thinwire.models.data.parts import BYTES
from thinwire.models.errors import require

if TYPE_CHECKING:
    from thinwire.models.data.kinds import Kind
    from thinwire.models.tasks import TaskName

LARGEST_SIDE = 8192
"""The most rows and columns that images are scaled to."""
Shuffle = Literal["epoch", "once", "never"]
"""When samples get a new random order. With "once" and "never", a batch holds the same samples in every epoch. AQ-SGD
suggests this if buffers are kept on disk, because they are then read in order."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The data to train on, and how they become samples."""

    name: str = "pydoc"
    """"pydoc" (Python's own documentation, half a megabyte of English) or "digits" (scikit-learn's 1797 handwritten
    digits); the path of a text, parquet, JSON (one object per line) or CSV file, or of a folder of text, tables or
    images; a data set on the Hugging Face hub; or module:function, a function of your own that takes a split."""
    mixture: dict[str, float] = field(default_factory=dict)
    """text, chat: other sources to train on beside `name`, and the share of the samples that each gives; `name` gives
    the rest. {"general.jsonl": 0.2}."""
    kind: str = "auto"
    """The task: "text" predicts the next token, "chat" the answers in conversations, "pairs" classifies a text or a
    pair of texts, "tags" the words of a text, "images" images; module:class is a kind of your own. "auto" means images
    for "digits", else text."""
    subset: str | None = None
    """The configuration of a data set that has several: cola, qnli, wikitext-2-raw-v1."""
    split: str = "train"
    """The part to train on."""
    evaluation: str | None = None
    """The data for evaluation. A word names another split of the data; anything else is a path ("./test"). null uses
    `held_out` instead."""
    held_out: float = 0.1
    """The fraction of the training part that is kept for evaluation if `evaluation` is null: the end of a text, else
    random samples, the same in every run; 0 keeps none."""
    limit: int | None = None
    """How many tokens of text, or samples, of each part to use, from its start; null uses all."""
    evaluation_limit: int | None = None
    """Limit of the `evaluation` data, if it differs from `limit`."""
    stream: int | None = None
    """text of tables, folders and the hub: how many rows are shuffled with each other while the run reads them; 1 does
    not shuffle. Then a pass is `limit` tokens, begun anew at the end of the data, and `evaluation` names what is held
    out. null reads all before the run."""
    columns: list[str] = field(default_factory=list)
    """The columns of a table to read; empty takes all columns of the right type (for text, the column "text", or
    "input_ids" with token ids; for chat, messages, conversations, prompt and completion, instruction, input and output,
    or input_ids and labels; for tags, "tokens")."""
    label: str = "label"
    """The column that holds the class, an integer; for tags a list with one for each word, "ner_tags" where there is no
    "label"."""
    tokenizer: str = BYTES
    """"bytes", or the name or folder of a tokenizer that transformers can load; "smollm2" is that model's tokenizer."""
    outline: str | None = None
    """A file of `thinwire outline`. Processes without the first stage read it, and never the data, which may be
    elsewhere."""
    block_size: int = 128
    """The number of tokens in a sample. Pairs, tagged texts and conversations are cut or padded to this length."""
    date: str | None = None
    """chat: the day for chat templates that ask for it, such as 2026-11-29. null takes today in UTC; a run keeps it for
    whatever comes later: going on, eval, generate, export."""
    packing: bool = False
    """chat: whether a sample holds as many whole conversations as fit. No conversation sees another; the model must
    read positions for that."""
    shuffle: Shuffle = "epoch"
    """When samples get a new random order: "epoch" (in every epoch), "once" (one order for all epochs) or "never"."""
    image_size: int | None = None
    """Images are scaled to this height and width; null does not scale: all images must then have the same size."""
    channels: int | None = None
    """1 for grey images, 3 for colour; null means 1 if all images are grey, else 3."""
    mean: list[float] = field(default_factory=list)
    """A value for each channel, subtracted from the pixels (0 to 1); empty measures a thousand training images."""
    std: list[float] = field(default_factory=list)
    """A value for each channel that the pixels are then divided by; give both `mean` and `std`, or neither."""
    crop: int = 0
    """Black pixels added on each side of a training image before a random part of the original size is cut out; 0 does
    not change the image."""
    flip: bool = False
    """Whether to mirror half of the training images, chosen at random."""

    def __post_init__(self) -> None:
        from thinwire.models.data.images import PILLOW_MODES
        from thinwire.models.data.sources import BUNDLED, RULE

        kind = self.chosen_kind
        bundled = BUNDLED.get(self.name, (kind.name,))
        fitting = (0, self.channels) if self.channels else (0, *PILLOW_MODES)
        sized = len(self.mean) == len(self.std) and len(self.mean) in fitting
        require(
            (bool(self.name), f"{RULE}, got ''"),
            (kind.name in bundled, f"the kind of {self.name} must be {' or '.join(bundled)}, got {self.kind!r}"),
            *self._rules_of_kinds(kind),
            (self.evaluation != "", "evaluation must be a split, a path or null, got ''"),
            (0 <= self.held_out < 1, f"held_out must lie in [0, 1), got {self.held_out}"),
            (self.limit is None or self.limit >= 1, f"limit must be at least 1, got {self.limit}"),
            (
                self.evaluation_limit is None or (self.evaluation_limit >= 1 and self.evaluation is not None),
                f"evaluation_limit must be at least 1, and needs evaluation, got {self.evaluation_limit} and "
                f"{self.evaluation}",
            ),
            (
                len(self.columns) <= kind.columns,
                f"columns must be at most {kind.columns} for kind {kind.name}, got {self.columns}"
                f"{'; set columns in the class' if is_path(kind.name) else ''}",
            ),
            (
                not kind.needs_tokenizer or self.tokenizer != BYTES,
                f"tokenizer must be {kind.needs_tokenizer} for kind {kind.name}, got {BYTES!r}",
            ),
            (self.name not in self.mixture, f"mixture must name other data than name, got {self.name} in both"),
            (not self.mixture or self.stream is None, "mixture and stream must not both be given; leave one out"),
            (
                all(share > 0 for share in self.mixture.values()) and sum(self.mixture.values()) < 1,
                f"mixture must have shares above 0 and together below 1, because {self.name} has the rest, got "
                f"{self.mixture}",
            ),
            *(self._rules_of_streams() if self.stream is not None else ()),
            (self.date is None or _is_date(self.date), f"date must be a day such as 2026-11-29, got {self.date}"),
            (self.block_size >= 1, f"block_size must be at least 1, got {self.block_size}"),
            (
                self.image_size is None or 1 <= self.image_size <= LARGEST_SIDE,
                f"image_size must be at most {LARGEST_SIDE} and at least 1, got {self.image_size}",
            ),
            (self.channels in (None, *PILLOW_MODES), f"channels must be 1 or 3, got {self.channels}"),
            (
                sized and all(map(math.isfinite, self.mean)) and all(0 < value < math.inf for value in self.std),
                f"mean and std must have a finite value for each channel, and std must be above 0, got {self.mean} and "
                f"{self.std}",
            ),
            (self.crop >= 0, f"crop must be at least 0, got {self.crop}"),
        )

    def _rules_of_kinds(self, kind: Kind) -> Iterator[tuple[bool, str]]:
        """Each field that only some kinds use is left as it is for the others."""
        from thinwire.models.data.kinds import KINDS

        usual = {"label": "label", "tokenizer": BYTES}
        for name in dict.fromkeys(name for each in KINDS.values() for name in each.uses):
            value, kinds = getattr(self, name), [each.name for each in KINDS.values() if name in each.uses]
            unset = not value or value == usual.get(name)
            told = f"{name} must be left out for kind {kind.name}, got {value}: it is for {' or '.join(kinds)}"
            yield unset or name in kind.uses, told

    def _rules_of_streams(self) -> list[tuple[bool, str]]:
        return [
            ((self.stream or 0) >= 1, f"stream must be at least 1 row, got {self.stream}"),
            (self.limit is not None, "stream needs a limit, the tokens of a pass; set limit"),
            (self.shuffle == "never", f"stream shuffles rows itself; set shuffle to never, got {self.shuffle}"),
            (
                self.held_out == 0 or self.evaluation is not None,
                f"stream keeps no samples for evaluation; name them by evaluation, or set held_out to 0, got "
                f"{self.held_out}",
            ),
        ]

    @property
    def chosen_kind(self) -> Kind:
        """The kind; in place of "auto" the one that it means for this data. ModelError if there is no such kind."""
        from thinwire.models.data.kinds import find_kind
        from thinwire.models.data.sources import BUNDLED

        return find_kind(BUNDLED.get(self.name, ("text",))[0] if self.kind == "auto" else self.kind)

    @property
    def task(self) -> TaskName:
        """The task that a model does with these data."""
        return self.chosen_kind.task

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """How much of the training data, and of the `evaluation` data, to use."""
        return self.limit, self.evaluation_limit or self.limit

    def more_samples(self, *, held_out: bool = False) -> list[str]:
        """What a user can change to get more samples."""
        own = held_out and self.evaluation_limit is not None
        name, limit = ("evaluation_limit", self.limits[1]) if own else ("limit", self.limit)
        limited = [] if limit is None else [f"raise data.{name}, which is {limit}"]
        shared = ["raise data.held_out"] if held_out and not self.evaluation else []
        return [*limited, *shared]


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
