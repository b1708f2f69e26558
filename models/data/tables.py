"""Data in tables of rows: parquet, JSON and CSV files, folders, and data sets on the Hugging Face hub.

`datasets` reads them all. It keeps a copy in its cache, so later processes map that copy and do not read the source
again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.errors import attempt
from thinwire.models import hub
from thinwire.models.data.files import read_bytes
from thinwire.models.data.parts import MAIN_SPLIT, TABLES, Columns, Labelled, Part, Picture, check_labels
from thinwire.models.errors import ModelError, require

if TYPE_CHECKING:
    from datasets import Dataset

Splits = dict[str, "Dataset"]
Open = Callable[[Part], Splits]
"""Opens the splits of one source."""
_EXTRA = "__index_level_0__"
"""The column into which pandas puts what stands before the columns of a header."""


def open_file(part: Part) -> Splits:
    """Open a table file as one split."""
    from datasets import load_dataset

    path = Path(part.name).expanduser()
    if path.suffix.lower() not in TABLES:
        known = ", ".join(TABLES)
        raise ModelError(f"a file of examples must be one of {known}, or a folder or hub name, got {part.name!r}")
    return dict(load_dataset(TABLES[path.suffix.lower()], part.subset, data_files=str(path)))


def open_folder(part: Part) -> Splits:
    """Open a folder of text, tables or images. `datasets` finds the splits in the names of files."""
    from datasets import load_dataset

    path = Path(part.name).expanduser()
    if part.subset is None and _holds_text_alone(path):
        # keep line ends, as run_clm does: concatenated lines would otherwise grow together
        return dict(load_dataset("text", data_dir=str(path), keep_linebreaks=True))
    return dict(load_dataset(str(path), part.subset))


def open_on_hub(part: Part) -> Splits:
    """Open a data set on the hub."""
    from datasets import load_dataset

    return dict(load_dataset(part.name, part.subset))


def read_texts(table: Dataset, part: Part, columns: Columns) -> list[str]:
    """The texts of one column."""
    usual = [name for name in ("text",) if name in table.column_names]
    (column,) = _columns_of_text(table, part, columns.examples or usual, 1)
    return _texts(table, column)


def read_pairs(table: Dataset, part: Part, columns: Columns) -> Labelled:
    """Tuples of the texts in one or two columns, and the labels. By default all columns of text are read."""
    texts, labels = attempt(
        lambda: [_texts(table, name) for name in _columns_of_text(table, part, columns.examples, 2)],
        lambda: _labels(table, part, columns.label),
    )
    return Labelled(list(zip(*texts, strict=True)), *labels)


def read_pictures(table: Dataset, part: Part, columns: Columns) -> Labelled:
    """The images of one column, not decoded, and the labels. By default the only column of images is read."""
    pictures, labels = attempt(
        lambda: _pictures(table, _column_of_images(table, part, columns.examples)),
        lambda: _labels(table, part, columns.label),
    )
    return Labelled(pictures, *labels)


def open_split(part: Part, opened: Open, rule: str) -> Dataset:
    """One split of a table.

    Raises:
        ModelError: the table cannot be read, has no such split, or has no rows. The message begins with `rule` if it
            cannot be read.
    """
    import datasets

    try:
        with _quiet(), hub.reading(part.name):
            splits = opened(part)
    except ModelError:
        raise
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        # the reason of an error of datasets is in its cause
        reason = hub.reason(part.name, error.__cause__ or error)
        raise ModelError(f"{rule}, got {part.name!r}: {reason}") from error
    wanted = part.split or (next(iter(splits)) if len(splits) == 1 else MAIN_SPLIT)
    known = ", ".join(splits)
    require((wanted in splits, f"the split of {part.name} must be one of {known}, got {wanted!r}"))
    table: Dataset = splits[wanted]
    require(
        (len(table) > 0, f"split {wanted!r} of {part.name} must have at least one row, got none"),
        (
            not (_EXTRA in table.column_names and _holds_csv(Path(part.name).expanduser())),
            f"the rows of {part.name} must have as many fields as its header, and have more: put texts with commas in "
            f"quotes",
        ),
    )
    return table


def _holds_csv(path: Path) -> bool:
    return any(file.suffix.lower() == ".csv" for file in (path.rglob("*") if path.is_dir() else [path]))


def _holds_text_alone(folder: Path) -> bool:
    suffixes = {path.suffix.lower() for path in folder.rglob("*") if path.is_file()}
    return ".txt" in suffixes and not suffixes & {*TABLES, ".png", ".jpg", ".jpeg"}


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn off the progress bars of `datasets`, and its log.

    Every stage process would draw the bars, and our own errors say what the log says. The bars of downloads stay: they
    belong to another library.
    """
    import datasets

    log, had_bars = logging.getLogger("datasets"), not datasets.are_progress_bars_disabled()
    level = log.level
    datasets.disable_progress_bars()
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
        if had_bars:
            datasets.enable_progress_bars()


def _columns_of_text(table: Dataset, part: Part, wanted: Sequence[str], at_most: int) -> list[str]:
    number = "one column" if at_most == 1 else "one or two columns"
    return _columns(table, part, wanted, at_most, f"{number} of text", _is_text)


def _column_of_images(table: Dataset, part: Part, wanted: Sequence[str]) -> str:
    (column,) = _columns(table, part, wanted, 1, "one column of images", _is_image)
    return column


def _columns(
    table: Dataset, part: Part, wanted: Sequence[str], at_most: int, what: str, fits: Callable[[Any], bool]
) -> list[str]:
    """The wanted columns; if none is named, all that fit."""
    fitting = [name for name, feature in table.features.items() if fits(feature)]
    chosen = list(wanted) or fitting
    told = ", ".join(table.column_names)
    missing = [name for name in chosen if name not in table.column_names]
    unfit = [name for name in chosen if name not in (*fitting, *missing)]
    require(
        (
            1 <= len(chosen) <= at_most,
            f"columns must name {what} of {part.name}, got {chosen}; it has {told}; set kind or columns",
        ),
        (not missing, f"columns must name columns of {part.name}, got {', '.join(missing)}; it has {told}"),
        (
            not unfit,
            f"columns must name {what} of {part.name}, got {', '.join(unfit)} of another type; set kind or columns",
        ),
    )
    return chosen


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")


def _is_image(feature: Any) -> bool:
    if isinstance(feature, dict):
        return "bytes" in feature
    return type(feature).__name__ == "Image" or getattr(feature, "dtype", None) in ("binary", "large_binary")


def _texts(table: Dataset, column: str) -> list[str]:
    texts: list[str] = list(table[column])
    bad = next((row for row, text in enumerate(texts) if not isinstance(text, str)), None)
    require((bad is None, f"column {column} must hold a text in every row, got none in row {bad}"))
    return texts


def _pictures(table: Dataset, column: str) -> list[Picture]:
    from datasets import Image

    if isinstance(table.features[column], Image):
        table = table.cast_column(column, Image(decode=False))
    values = table.with_format("arrow")[:][column].to_pylist()
    bad = next((row for row, value in enumerate(values) if _is_nothing(value)), None)
    require((bad is None, f"column {column} must hold an image in every row, got none in row {bad}"))
    return [_encoded(value) for value in values]


def _encoded(value: Any) -> bytes:
    """The bytes of an image file: the value itself, its field `bytes`, or the file at its field `path`."""
    encoded: bytes = value if isinstance(value, bytes) else value["bytes"] or read_bytes(Path(value["path"]))
    return encoded


def _is_nothing(value: Any) -> bool:
    return not (any(value.get(key) for key in ("bytes", "path")) if isinstance(value, dict) else value)


def _labels(table: Dataset, part: Part, column: str) -> tuple[Tensor, int]:
    """The labels, and the number of classes."""
    told = ", ".join(table.column_names)
    require((column in table.column_names, f"label must be a column of {part.name}, got {column!r}; it has {told}"))
    feature = table.features[column]
    kind = str(getattr(feature, "dtype", feature))
    require((bool(re.fullmatch(r"u?int\d+", kind)), f"column {column} must hold integers as labels, got {kind}"))
    values = list(table[column])
    missing = next((row for row, value in enumerate(values) if value is None), None)
    require((missing is None, f"column {column} must hold a label in every row, got none in row {missing}"))
    labels = torch.tensor(values, dtype=torch.int64)
    num_labels = getattr(feature, "num_classes", None) or int(labels.max()) + 1
    check_labels(labels, num_labels, f"column {column} of {part.name}")
    return labels, num_labels
