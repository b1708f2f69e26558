"""Data in tables of rows: parquet, JSON and CSV files, folders, and data sets on the Hugging Face hub.

All go through `datasets`, which keeps a copy in its cache that later processes map instead of reading again.
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
from thinwire.models.data.files import read_bytes
from thinwire.models.data.parts import MAIN_SPLIT, TABLES, Columns, Labelled, Part, Picture, check_labels
from thinwire.models.errors import ModelError, require

if TYPE_CHECKING:
    from datasets import Dataset

Splits = dict[str, "Dataset"]
Open = Callable[[Part], Splits]
"""The splits of one source, opened."""


def open_file(part: Part) -> Splits:
    """A table's file, which is one split."""
    from datasets import load_dataset

    path = Path(part.name).expanduser()
    if path.suffix.lower() not in TABLES:
        known = ", ".join(TABLES)
        raise ModelError(f"a file of examples must be one of {known}, or a folder or hub name, got {part.name!r}")
    return dict(load_dataset(TABLES[path.suffix.lower()], part.subset, data_files=str(path)))


def open_folder(part: Part) -> Splits:
    """A folder of text, tables or images, as `datasets` reads its files' names."""
    from datasets import load_dataset

    path = Path(part.name).expanduser()
    if part.subset is None and _holds_text_alone(path):
        # as run_clm reads text: without the ends of lines, what is concatenated would be one word
        return dict(load_dataset("text", data_dir=str(path), keep_linebreaks=True))
    return dict(load_dataset(str(path), part.subset))


def open_on_hub(part: Part) -> Splits:
    """A data set on the hub."""
    from datasets import load_dataset

    return dict(load_dataset(part.name, part.subset))


def read_texts(table: Dataset, part: Part, columns: Columns) -> list[str]:
    """The texts of one column."""
    usual = [name for name in ("text",) if name in table.column_names]
    (column,) = _columns_of_text(table, part, columns.examples or usual, 1)
    return _texts(table, column)


def read_pairs(table: Dataset, part: Part, columns: Columns) -> Labelled:
    """The texts of one or two columns, as tuples, and the labels; by default all columns of text, in their order."""
    texts, labels = attempt(
        lambda: [_texts(table, name) for name in _columns_of_text(table, part, columns.examples, 2)],
        lambda: _labels(table, part, columns.label),
    )
    return Labelled(list(zip(*texts, strict=True)), *labels)


def read_pictures(table: Dataset, part: Part, columns: Columns) -> Labelled:
    """The images of a column, not decoded, and the labels; by default the only column of images."""
    pictures, labels = attempt(
        lambda: _pictures(table, _column_of_images(table, part, columns.examples)),
        lambda: _labels(table, part, columns.label),
    )
    return Labelled(pictures, *labels)


def open_split(part: Part, opened: Open, rule: str) -> Dataset:
    """One split of a table.

    Raises:
        ModelError: if it cannot be read, has no such split, or no rows.
    """
    import datasets

    try:
        with _quiet():
            splits = opened(part)
    except ModelError:
        raise
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        # datasets tells the cause of its own errors only as their cause
        reason = " ".join(str(error.__cause__ or error).split())
        raise ModelError(f"{rule}, got {part.name!r}: {reason}") from error
    wanted = part.split or (next(iter(splits)) if len(splits) == 1 else MAIN_SPLIT)
    known = ", ".join(splits)
    require((wanted in splits, f"{part.name} must have the split {wanted!r}, or be given another: it has {known}"))
    table: Dataset = splits[wanted]
    require((len(table) > 0, f"there must be at least one row in split {wanted!r} of {part.name}, got none"))
    return table


def _holds_text_alone(folder: Path) -> bool:
    suffixes = {path.suffix.lower() for path in folder.rglob("*") if path.is_file()}
    return ".txt" in suffixes and not suffixes & {*TABLES, ".png", ".jpg", ".jpeg"}


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the bars of `datasets` off, which every stage process would draw, and its log of what we raise anyway.

    The bars of downloads are not its own, and stay.
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
    """The columns wanted, or all that fit where none is named."""
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
        (not missing, f"{part.name} must have the columns {wanted}, lacks {', '.join(missing)}; it has {told}"),
        (
            not unfit,
            f"columns must name {what} of {part.name}, got {', '.join(unfit)}, which hold something else; set kind or "
            "columns",
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
    """The file of an image: as a table holds it, or as its `bytes` or `path` do."""
    encoded: bytes = value if isinstance(value, bytes) else value["bytes"] or read_bytes(Path(value["path"]))
    return encoded


def _is_nothing(value: Any) -> bool:
    return not (any(value.get(key) for key in ("bytes", "path")) if isinstance(value, dict) else value)


def _labels(table: Dataset, part: Part, column: str) -> tuple[Tensor, int]:
    """The labels, and how many classes there are."""
    told = ", ".join(table.column_names)
    require((column in table.column_names, f"{part.name} must have the label column {column!r}; it has {told}"))
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
