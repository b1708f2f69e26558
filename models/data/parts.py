"""What is asked of a source of data, a part of it by name, and what it gives: texts, or examples with a label each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from thinwire.errors.names import colon_hint
from thinwire.models.errors import ModelError, require

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Kind = Literal["text", "pairs", "images"]
MAIN_SPLIT = "train"
"""The split of data that has no splits: a single file, or what is bundled."""

TABLES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
"""Suffixes of the files of examples, and what `datasets` calls their format."""
_FILES = {*TABLES, ".txt", ".text", ".md", ".gz", ".zip", ".tar", ".png", ".jpg", ".jpeg"}
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

Picture: TypeAlias = "bytes | np.ndarray[Any, Any]"
"""An image as it is stored: an encoded file, or uint8 pixels [H, W] or [H, W, C]."""


@dataclass(frozen=True)
class Part:
    """One part of one source."""

    name: str
    """What a source is called: one that is bundled, the path of a file or folder, a name on the hub, or
    `module:function`, a function of your own."""
    split: str | None = MAIN_SPLIT
    """Null stands for "train", or else the only split there is."""
    subset: str | None = None
    """The configuration of a data set that has several: "cola" of GLUE."""


@dataclass(frozen=True)
class Columns:
    """The columns of a table that are read; other sources have none."""

    examples: Sequence[str] = ()
    """Those with texts or images; empty takes those of the right type (of text the one called "text")."""
    label: str = "label"
    """The one with the class, an integer."""


USUAL = Columns()
"""The columns of a table of which nothing is known."""


@dataclass(frozen=True)
class Labelled:
    """Examples with an integer label each."""

    examples: Sequence[Any]
    """Tuples of one or two texts, or `Picture`s."""
    labels: Tensor
    """int64 [N], in 0..num_labels - 1."""
    num_labels: int
    """The classes that the source declares, or else one more than its largest label."""

    def __len__(self) -> int:
        return len(self.examples)

    def select(self, ids: Sequence[int]) -> Labelled:
        """The examples of these ids, in that order."""
        return replace(self, examples=[self.examples[i] for i in ids], labels=self.labels[list(ids)])


def local_path(name: str, rule: str, *, own: bool = False) -> Path | None:
    """The path that a name is; None if it can only be a name on the hub.

    Args:
        name: the name.
        rule: the rule for such names, for the error.
        own: whether the rule allows `module:name`; then `module.name` is refused with a hint.

    Raises:
        ModelError: if there is no such file or folder, and the hub cannot have such a name.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    is_file = path.suffix.lower() in _FILES
    hint = colon_hint(name) if own and not is_file else ""
    if not hint and _HUB_NAME.fullmatch(name) and not is_file:
        return None
    raise ModelError(f"{rule}, got {name!r}{hint}: no such file or folder")


def evaluation_part(training: Part, evaluation: str) -> Part:
    """The part that `evaluation` names: another split of the training source, or else a source of its own."""
    return replace(training, split=evaluation) if is_split(evaluation) else Part(evaluation, split=None)


def is_split(evaluation: str) -> bool:
    """Whether `evaluation` names a split: a bare word does, where "./test" is a path."""
    return bool(re.fullmatch(r"\w+", evaluation))


def require_no_split(part: Part) -> None:
    """Raise ModelError if a source without splits is asked for one."""
    require(
        (
            part.split in (None, MAIN_SPLIT),
            f"{part.name} has no splits, got {part.split!r}; leave split as it is, and let evaluation be a path, "
            f"such as ./{part.split}, or null",
        )
    )


def check_labels(labels: Tensor, num_labels: int, where: str) -> None:
    """Raise ModelError with the first label outside 0..num_labels - 1."""
    bad = ((labels < 0) | (labels >= num_labels)).nonzero().flatten().tolist()
    got = f"{int(labels[bad[0]])} in row {bad[0]}" if bad else ""
    require((not bad, f"labels must lie in 0..{num_labels - 1}, got {got} of {where}"))
