"""What a source of data is asked for (a part, by name), and what it gives: texts, or examples with labels."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from thinwire.errors.names import colon_hint
from thinwire.models.errors import ModelError, require

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

BYTES = "bytes"
"""The name of the tokenizer that needs no library."""
ROLES = {
    **{name: name for name in ("system", "user", "assistant", "tool")},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"},
}
"""Who speaks in ShareGPT's `from`, and the role that this is."""
ANSWERS = "assistant"
"""The role whose messages count."""
MARKS = ("weight", "train")
"""By which an answer says that it does not count: 0 in OpenAI's format, false in axolotl's."""
MAIN_SPLIT = "train"
"""The name of the only split of data without splits, such as a single file or bundled data."""

TABLES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
"""Suffixes of table files, and the name of their format in `datasets`."""
_FILES = {*TABLES, ".txt", ".text", ".md", ".gz", ".zip", ".tar", ".png", ".jpg", ".jpeg"}
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

Picture: TypeAlias = "bytes | np.ndarray[Any, Any]"
"""A stored image: the bytes of an image file, or uint8 pixels [H, W] or [H, W, C]."""


@dataclass(frozen=True)
class Part:
    """One part of one source."""

    name: str
    """The name of the source: bundled data, the path of a file or folder, a name on the hub, or `module:function`, a
    function of your own."""
    split: str | None = MAIN_SPLIT
    """None means the only split, or the only one beside "train"."""
    subset: str | None = None
    """The configuration of a data set that has several: "cola" of GLUE."""
    streamed: bool = False
    """Whether a table is read row by row when it is needed."""


@dataclass(frozen=True)
class Columns:
    """The columns of a table to read; other sources have no columns."""

    examples: Sequence[str] = ()
    """Columns with texts, conversations or images; empty takes all columns of the right type (for text, the column
    "text")."""
    label: str = "label"
    """The column with the class, an integer."""
    report: Callable[[str], None] = lambda sentence: None
    """Gets a sentence on which columns are read."""


@dataclass(frozen=True)
class Conversation:
    """Messages, of which some are answers to learn."""

    messages: Sequence[dict[str, Any]]
    """What a chat template reads: role, content, and whatever else the template knows."""
    first: int = 0
    """Answers among the messages before this one belong to the question, and do not count."""
    tools: Sequence[Any] = ()
    """What describes the tools that answers may call, as a chat template reads it."""
    place: str = field(default="", compare=False)
    """Where it comes from, for errors: "row 4 of a.jsonl"."""


@dataclass(frozen=True)
class Labelled:
    """Examples, each with an integer label, or with one for each of its words."""

    examples: Sequence[Any]
    """Tuples of one or two texts or of one list of words, or `Picture`s."""
    labels: Tensor
    """int64 [N], in 0..num_labels - 1; of words [N, W], `IGNORE` behind them."""
    num_labels: int
    """The number of classes that the source declares, or else its largest label plus 1."""
    classes: tuple[str, ...] = ()
    """The names of the classes, by number; empty if the source has none."""
    source: str = ""
    """The name of the source, for errors."""
    places: Sequence[int | str] = ()
    """The row of each example in the source, or its file; empty means that the rows are 0, 1, 2..."""

    def __len__(self) -> int:
        return len(self.examples)

    def select(self, ids: Sequence[int]) -> Labelled:
        """The examples with these ids, in this order."""
        return replace(
            self,
            examples=[self.examples[i] for i in ids],
            labels=self.labels[list(ids)],
            places=[self.places[i] if self.places else i for i in ids],
        )

    def place(self, index: int) -> str:
        """Where an example comes from, in words: "row 4 of a.csv"."""
        place = self.places[index] if self.places else index
        return f"row {place} of {self.source}".removesuffix(" of ") if isinstance(place, int) else place

    def numbered_as(self, training: Labelled) -> Labelled:
        """The same examples, their classes numbered as in the training data, by name where both have names.

        Raises:
            ModelError: the training data lack a class.
        """
        where = "the evaluation data; the training data lack this class"
        if not (self.classes and training.classes) or self.classes == training.classes:
            check_labels(self.labels, training.num_labels, where)
            return self
        import torch

        from thinwire.models.tasks import IGNORE

        check_labels(self.labels, self.num_labels, where)
        used = [self.classes[label] for label in self.labels.unique().tolist() if label != IGNORE]
        if unknown := [name for name in used if name not in training.classes]:
            raise ModelError(
                f"the evaluation data must have classes of the training data, got {', '.join(unknown)}; those of the "
                f"training data are {', '.join(training.classes)}"
            )
        numbers = [training.classes.index(name) if name in used else -1 for name in self.classes]
        labels = torch.where(self.labels == IGNORE, IGNORE, torch.tensor(numbers)[self.labels.clamp(min=0)])
        return replace(self, labels=labels, num_labels=training.num_labels, classes=training.classes)


def local_path(name: str, rule: str, *, own: bool = False) -> Path | None:
    """The name as a path, if there is such a file or folder; None if it may be a name on the hub.

    The error begins with `rule`. `own` says that it allows `module:name`; then `module.name` is refused with a hint.

    Raises:
        ModelError: there is no such file or folder, and it cannot be a name on the hub. The message begins with `rule`.
    """
    path = Path(name)
    if path.exists():
        return path
    is_file = path.suffix.lower() in _FILES
    hint = colon_hint(name) if own and not is_file else ""
    if not hint and _HUB_NAME.fullmatch(name) and not is_file:
        return None
    where = "" if path.is_absolute() else f" in {Path.cwd()}"
    raise ModelError(f"{rule}, got {name!r}{hint}: no such file or folder{where}")


def evaluation_part(training: Part, evaluation: str) -> Part:
    """The part that `evaluation` names: another split of the training source, or another source."""
    return replace(training, split=evaluation) if is_split(evaluation) else Part(evaluation, split=None)


def is_split(evaluation: str) -> bool:
    """Whether `evaluation` names a split. A single word does; "./test" is a path."""
    return bool(re.fullmatch(r"\w+", evaluation))


def split_of(part: Part, splits: Collection[str]) -> str:
    """The split that is read of a source that has these. ModelError if it has no such split, or which is not said."""
    known = ", ".join(splits)
    others = [name for name in splits if name != MAIN_SPLIT] or [*splits]
    wanted = part.split or (others[0] if len(others) == 1 else "")
    require(
        (
            bool(wanted),
            f"evaluation must name data of one split, got {part.name}, which has {known}; name a file or folder that "
            "holds one of them alone",
        ),
        (wanted in ("", *splits), f"the split of {part.name} must be one of {known}, got {wanted!r}"),
    )
    return wanted


def require_no_split(part: Part) -> None:
    """Raise ModelError if a part of a source without splits names a split."""
    if part.split not in (None, MAIN_SPLIT):
        raise ModelError(
            f"{part.name} has no splits, got {part.split!r}; leave split as it is, and let evaluation be a path, "
            f"such as ./{part.split}, or null"
        )


def check_labels(labels: Tensor, num_labels: int, where: str) -> None:
    """Raise ModelError with the first label outside 0..num_labels - 1; behind those of words is `IGNORE`."""
    from thinwire.models.tasks import IGNORE

    unfit = (labels < 0) | (labels >= num_labels)
    places = (unfit if labels.dim() == 1 else unfit & (labels != IGNORE)).nonzero().tolist()
    if places:
        got = f"{int(labels[tuple(places[0])])} in row {places[0][0]}"
        raise ModelError(f"labels must lie in 0..{num_labels - 1}, got {got} of {where}")
