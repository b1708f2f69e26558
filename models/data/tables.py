"""Data in tables of rows: parquet, JSON and CSV files, folders, and data sets on the Hugging Face hub.

`datasets` reads them all. It keeps a copy in its cache, so later processes map that copy and do not read the source
again.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import attempt
from thinwire.errors.calls import first_line
from thinwire.errors.files import MARK
from thinwire.errors.names import first_of
from thinwire.models import hub
from thinwire.models.data.chats import BESIDE, LAYOUTS, ChatTokens, conversation_of, encoded_of
from thinwire.models.data.files import read_bytes, require_text
from thinwire.models.data.parts import (
    TABLES,
    Columns,
    Conversation,
    Labelled,
    Part,
    Picture,
    check_labels,
    split_of,
)
from thinwire.models.errors import ModelError, require
from thinwire.models.first_bytes import nests_beyond, told_by
from thinwire.models.tasks import IGNORE, MOST_CLASSES

if TYPE_CHECKING:
    from datasets import Dataset

Splits = dict[str, "Dataset"]
Open = Callable[[Part, Columns], Splits]
"""Opens the splits of one source, and reports what of it is not read."""
Rows = Callable[[], Iterator[list[str] | Tensor]]
"""Begins to read texts, or token ids in a row, int32 [N]: a part of them at a time, the same each time."""
_STREAMED = 1000
"""The rows of such a part."""
_TYPED = 10_000
"""The rows of CSV that `datasets` reads at a time."""
_TEXTS = {".txt", ".text", ".md", ".rst"}
"""Suffixes of files that are read as text where a folder holds nothing else."""
_NAMING = re.compile(r"(.*_)?(id|ids|idx|index|guid|uuid|key|url|source|date|path|file|filename|hash)", re.IGNORECASE)
"""Names of columns that distinguish rows. Only a user who names such a column reads its texts."""
_LARGEST_FILE = 2**28
"""The most bytes of an image file that a row names."""
_FEW_CLASSES = 1000
"""The number of classes that any table may have; of more, it has a row for each."""
_NAMED = 20
"""The most columns that a sentence lists."""
_MOST_NESTED = 64
"""The most levels of lists and objects in JSON; `datasets` bears some 300."""
_WORDS, _TAGS = "tokens", "ner_tags"
"""The usual columns of words, and of their tags."""


def open_file(part: Part, columns: Columns) -> Splits:
    """Open a table file as one split."""
    path = Path(part.name)
    if path.suffix.lower() not in TABLES:
        known = ", ".join(TABLES)
        raise ModelError(f"a file of examples must be one of {known}, or a folder or hub name, got {part.name!r}")
    said = "empty: it has no rows" if path.stat().st_size == 0 else told_by(path)
    if said:
        raise OSError(f"it is {said}")
    _check_readable(path)
    pattern = glob.escape(str(path))  # which the library takes it for
    return _opened(part, _builder(TABLES[path.suffix.lower()], part.subset, data_files=pattern))


def _check_readable(path: Path) -> None:
    """Raise OSError for a table that would end the process in a library, take its memory, or be read otherwise.

    That is JSON whose first row is null, or that is nested deep, parquet that declares very many classes, and CSV with
    more fields than its header, of which pandas would take the last ones.
    """
    match TABLES.get(path.suffix.lower()):
        case "json":
            _check_json(path)
        case "parquet":
            import pyarrow.parquet

            with path.open("rb") as file:
                declared = (pyarrow.parquet.read_schema(file).metadata or {}).get(b"huggingface", b"")
            numbers = map(int, re.findall(rb'"num_classes":\s*(\d{1,99})', declared))
            if (most := max(numbers, default=0)) > MOST_CLASSES:
                raise OSError(f"{path.name} must have at most {MOST_CLASSES} classes, and declares {most}")
        case "csv":
            import pandas

            with suppress(ValueError):  # what cannot be read is told when it is
                first = pandas.read_csv(path, nrows=1)
                if len(first) and not isinstance(first.index, pandas.RangeIndex):
                    raise OSError(
                        f"the rows of {path.name} must have as many fields as its header, and have more: put texts "
                        f"with commas in quotes"
                    )


def _check_json(path: Path) -> None:
    with path.open("rb") as file:
        begin = file.read(512).removeprefix(b"\xef\xbb\xbf").lstrip()
    if begin and begin[:1] not in b"{[":
        raise OSError(f"{path.name} must hold one JSON object per line, and begins otherwise")
    if nests_beyond(path, _MOST_NESTED):
        raise OSError(f"{path.name} must be nested at most {_MOST_NESTED} levels deep: write it flatter")


def open_folder(part: Part, columns: Columns) -> Splits:
    """Open a folder of text, tables or images. `datasets` finds the splits in the names of files.

    It reads one format, and where a name says train or test, no file whose name says nothing.
    """
    path = Path(part.name)
    for file in path.rglob("*"):
        if file.is_file():
            _check_readable(file)
    place = str(path.resolve())  # the library takes the data's name from the last part, and "." has none
    if part.subset is None and _holds_text_alone(path):
        # keep line ends, as run_clm does: concatenated lines would otherwise grow together
        builder = _builder("text", data_dir=place, keep_linebreaks=True, encoding="utf-8-sig")
    else:
        builder = _builder(place, part.subset)
    runs = {mark.parent.resolve() for mark in path.rglob(MARK)}
    for file in chain(*(builder.config.data_files or {}).values()):
        if runs.intersection(Path(file).resolve().parents):
            raise ModelError(
                f"{path} must hold data alone, but {file} would be read as data too, and a run of Thinwire wrote it; "
                f"move the run to a place outside {path}: it can go on from there"
            )
    unread = _unread(path, chain(*(builder.config.data_files or {}).values()))
    if unread and part.subset is None:
        columns.report(f"files of {part.name} that are not read: {first_of(unread, _NAMED)}")
    return _opened(part, builder)


def _unread(folder: Path, found: Iterable[str]) -> list[str]:
    """The files of a folder that look like its data, and are none of those that `datasets` found."""
    read = {Path(name).resolve() for name in found}
    suffixes = {*TABLES, *_TEXTS, *(path.suffix.lower() for path in read)}
    unread = []
    for file in folder.rglob("*"):
        name = file.relative_to(folder)
        hidden = name.name == "README.md" or any(part[0] in "._" for part in name.parts)
        like_data = not suffixes.isdisjoint(map(str.lower, name.suffixes))  # .jsonl.gz is JSON
        if like_data and not hidden and file.is_file() and file.resolve() not in read:
            unread.append(str(name))
    return sorted(unread)


def _builder(*arguments: str | None, **options: Any) -> Any:
    """What `datasets` reads files with: those that are named, and the same texts in every part of a CSV.

    `datasets` replaces variables of the environment in paths. It reads CSV in parts, and makes numbers of a column
    that has digits alone in a part. A second builder says which columns are text: the first one finds the files, and
    the cache goes by what a builder is made with.
    """
    from datasets import load_dataset_builder

    builder = load_dataset_builder(*arguments, **options)
    files = [*chain(*(builder.config.data_files or {}).values())]
    for name in chain(*(re.findall(r"\$\w+|\$\{[^}]*\}", path) for path in files)):
        if os.path.expandvars(name) != name:
            said = f"datasets replaces {name} in a path by a variable of the environment"
            raise OSError(f"{said}: name the file or folder otherwise")
    if hasattr(builder.config, "converters") and (texts := _texts_of_csv(files)):
        return load_dataset_builder(*arguments, **options, converters=dict.fromkeys(texts, _text_of_csv))
    return builder


def _texts_of_csv(files: Iterable[str]) -> set[str]:
    """The columns of CSV files that have text in the first part."""
    import pandas

    found = set[str]()
    for path in files:
        with suppress(ValueError, OSError):  # what cannot be read is told when it is
            first = pandas.read_csv(path, nrows=_TYPED)
            found |= {str(name) for name in first if not pandas.api.types.is_numeric_dtype(first[name])}
    return found


def _text_of_csv(text: str) -> str | None:
    return text or None


def _opened(part: Part, builder: Any) -> Splits:
    """The splits that `datasets` makes, from its cache if it has them."""
    if part.streamed:
        return dict(builder.as_streaming_dataset())
    builder.download_and_prepare()
    return dict(builder.as_dataset())


def open_on_hub(part: Part, columns: Columns) -> Splits:
    """Open a data set on the hub."""
    from datasets import load_dataset_builder

    return _opened(part, load_dataset_builder(part.name, part.subset))


def read_texts(table: Dataset, part: Part, columns: Columns) -> list[str] | Tensor:
    """The texts of one column, or its token ids in a row, int32 [N]."""
    return _column_read(table, _column_of_tokens(table, part, columns))


def _column_of_tokens(table: Dataset, part: Part, columns: Columns) -> str:
    usual = [name for name in ("text", "input_ids") if name in table.column_names][:1]
    (column,) = _columns(
        table, part, columns.examples or usual, 1, "one column of text", lambda one: _is_text(one) or _is_ids(one)
    )
    columns.report(f"of {part.name}, column {column} is read")
    return column


def _column_read(table: Dataset, column: str, before: int = 0) -> list[str] | Tensor:
    """What a column holds; `before` is how many rows were read before these."""
    return _integers(table, column) if _is_ids(table.features[column]) else _texts(table, column, before)


def stream_texts(table: Any, part: Part, columns: Columns, buffer: int, seed: int) -> Rows:
    """As `read_texts`, a thousand rows at a time, shuffled within a buffer of rows."""
    from datasets import Dataset, Features

    # JSON declares no types, and a thousand empty lists show none: the first row decides
    first = Dataset.from_list(list(table.take(1)), features=table.features)
    column = _column_of_tokens(first, part, columns)
    features = Features({column: first.features[column]})
    alone = table.select_columns([column])
    shuffled = alone if buffer == 1 else alone.shuffle(seed=seed, buffer_size=buffer)  # which shuffles files, too

    def rows() -> Iterator[list[str] | Tensor]:
        batches, done = shuffled.iter(_STREAMED), 0
        while True:
            try:
                batch = next(batches, None)
                read = batch and Dataset.from_dict(batch, features=features)
            except Exception as error:  # of the readers of every format
                raise ModelError(
                    f"{part.name} cannot be read to its end: {first_line(error.__cause__ or error)}"
                ) from error
            if read is None:
                return
            yield _column_read(read, column, done)
            done += len(read)

    return rows


def _integers(table: Dataset, column: str, least: int = 0) -> Tensor:
    """The integers of all lists of a column in a row, int32 [N], none below `least`."""
    rows = _arrow(table, column).combine_chunks()
    values = rows.flatten()
    whole = not (rows.null_count or values.null_count)
    require((whole, f"column {column} must hold a list of integers in every row, got null in some"))
    found = torch.from_numpy(values.to_numpy().astype(np.int64))
    bad = found[(found < least) | (found >= 2**31)].tolist()
    require((not bad, f"column {column} must hold integers from {least} on, got {bad[:1]}"))
    return found.int()


def read_chats(table: Dataset, part: Part, columns: Columns) -> list[Conversation] | list[ChatTokens]:
    """The conversations of one column of messages, or of columns with questions and, in the last one, answers.

    Columns of integers are token ids and, in the second one, labels.
    """
    found = next((layout for layout in LAYOUTS if set(layout) <= set(table.column_names)), ())
    names = [name for name in columns.examples or found if name not in BESIDE]
    beside = [name for name in BESIDE if name in {*table.column_names, *columns.examples} and "input_ids" not in names]
    missing = ", ".join(name for name in [*names, *beside] if name not in table.column_names)
    if missing or not names:
        known = "; ".join(" and ".join(layout) for layout in LAYOUTS)
        raise ModelError(
            f"columns must name those of {part.name} that hold conversations, got {missing or 'none'}; it has "
            f"{_named(table)}; those found by themselves are {known}"
        )
    unread = [name for name in table.column_names if name not in [*names, *beside]]
    rest = f"; not read: {first_of(unread, _NAMED)}" if unread else ""
    columns.report(f"of {part.name}, column {' and '.join([*names, *beside])} is read{rest}")
    # decoded by the library: messages of unlike fields are stored as JSON
    rows = zip(*(table[name][:] for name in names), strict=True)
    places = [f"row {row} of {part.name}" for row in range(len(table))]
    if len(names) < 3 and all(_is_ids(table.features[name]) for name in names):
        for name, least in zip(names, (0, IGNORE), strict=False):
            _integers(table, name, least)
        return [encoded_of(row, at) for row, at in zip(rows, places, strict=True)]
    features = [table.features[name] for name in names]
    others = [[_without_filling(value, table.features[name]) for value in table[name][:]] for name in beside]
    return [
        conversation_of([*map(_without_filling, values, features)], at, **dict(zip(beside, more, strict=True)))
        for values, at, *more in zip(rows, places, *others, strict=True)
    ]


def _without_filling(value: Any, feature: Any) -> Any:
    """A value of a column, without the fields that hold nothing: parquet gives each object the fields of all.

    The arguments of one tool would have those of the others as null, and a part of text an image.
    """
    if isinstance(value, dict) and isinstance(feature, dict):
        return {name: _without_filling(each, feature[name]) for name, each in value.items() if each is not None}
    if isinstance(value, list) and hasattr(feature, "feature"):
        return [_without_filling(each, feature.feature) for each in value]
    return value


def read_pairs(table: Dataset, part: Part, columns: Columns) -> Labelled:
    """Tuples of the texts in one or two columns, and the labels. By default all columns of text are read."""
    names, labels = attempt(
        lambda: _columns(table, part, columns.examples, 2, "one or two columns of text", _is_text),
        lambda: _labels(table, part, columns.label),
    )
    _report(part, columns, names)
    texts = [_texts(table, name) for name in names]
    return Labelled(list(zip(*texts, strict=True)), *labels)


def read_tags(table: Dataset, part: Part, columns: Columns) -> Labelled:
    """Tuples of a list of words, and the number of each word's tag. By default columns "tokens" and "ner_tags"."""
    label = columns.label if columns.label in table.column_names else _TAGS
    [words, *_] = [*columns.examples, _WORDS]
    lists = [name for name, feature in table.features.items() if _is_list(feature)]
    if words not in lists or label not in lists or not _is_ids(table.features[label]):
        raise ModelError(
            f"columns must name one of words, and label one of numbers of their tags, lists of {part.name}, got "
            f"{words} and {columns.label}; it has {_named(table)}, and of lists {first_of(lists, _NAMED) or 'none'}"
        )
    _report(part, replace(columns, label=label), [words])
    texts, tags = table[words][:], table[label][:]
    for row, (some, numbers) in enumerate(zip(texts, tags, strict=True)):
        fits = all(isinstance(word, str) for word in some or [None]) and len(some) == len(numbers or ())
        require((fits, f"row {row} of {part.name} must have words, and a tag for each of them"))
    declared, flat = table.features[label].feature, _integers(table, label)
    num_labels = getattr(declared, "num_classes", None) or int(flat.max()) + 1
    labels = torch.full((len(tags), max(map(len, tags))), IGNORE)
    labels[torch.arange(labels.shape[1]) < torch.tensor([[len(some)] for some in tags])] = flat.long()
    check_labels(labels, num_labels, f"column {label} of {part.name}")
    return Labelled([(some,) for some in texts], labels, num_labels, tuple(getattr(declared, "names", None) or ()))


def read_pictures(table: Dataset, part: Part, columns: Columns) -> Labelled:
    """The images of one column, not decoded, and the labels. By default the only column of images is read."""
    [column], (labels, num_labels, classes) = attempt(
        lambda: _columns(table, part, columns.examples, 1, "one column of images", _is_image),
        lambda: _labels(table, part, columns.label),
    )
    _report(part, columns, [column])
    pictures, places = map(list, zip(*_pictures(table, column, part), strict=True))
    return Labelled(pictures, labels, num_labels, classes, source=part.name, places=places)


def _report(part: Part, columns: Columns, names: Sequence[str]) -> None:
    columns.report(f"of {part.name}, column {' and '.join(names)} is read, and the class from {columns.label}")


def open_split(part: Part, columns: Columns, opened: Open, rule: str) -> Dataset:
    """One split of a table.

    Raises:
        ModelError: the table cannot be read, has no such split, or has no rows. The message begins with `rule` if it
            cannot be read.
    """
    try:
        import datasets

        datasets.disable_progress_bars()  # every stage process would draw them; those of downloads stay
        logging.getLogger("datasets").setLevel(logging.CRITICAL)  # our own errors say what it says
        with hub.reading(part.name):
            splits = opened(part, columns)
    except ModelError:
        raise
    except Exception as error:  # of the readers of every format
        # the reason of an error of datasets is in its cause
        cause = error.__cause__ or error
        empty = isinstance(cause, StopIteration) or "corresponds to no data" in str(cause)
        kept = getattr(sys.modules.get("datasets.config"), "HF_DATASETS_CACHE", "")  # none if it is not installed
        reason = "it has no rows" if empty else hub.reason(part.name, cause, kept)
        raise ModelError(f"{rule}, got {part.name!r}: {reason}") from error
    wanted = split_of(part, splits)
    table: Dataset = splits[wanted]
    try:
        some = next(iter(table.take(1)), None) if part.streamed else len(table) > 0
    except Exception as error:  # of the readers of every format
        raise ModelError(f"{rule}, got {part.name!r}: {first_line(error.__cause__ or error)}") from error
    require((bool(some), f"split {wanted!r} of {part.name} must have at least one row, got none"))
    return table


def _holds_text_alone(folder: Path) -> bool:
    files = {path for path in folder.rglob("*") if path.is_file()}
    suffixes = {path.suffix.lower() for path in files}
    alone = ".txt" in suffixes and not suffixes & {*TABLES, ".png", ".jpg", ".jpeg"}
    if not (alone or (suffixes and suffixes <= _TEXTS)):
        return False
    for path in sorted(files):
        require_text(path)
    return True


def _columns(
    table: Dataset, part: Part, wanted: Sequence[str], at_most: int, what: str, fits: Callable[[Any], bool]
) -> list[str]:
    """The wanted columns; if none is named, all that fit, but for those that distinguish rows.

    Beside lists, as of messages, no column is the one that is meant: it must be named.
    """
    fitting = [name for name, feature in table.features.items() if fits(feature)]
    usual = [name for name in fitting if not _NAMING.fullmatch(name)]
    lists = [name for name, feature in table.features.items() if _is_list(feature) and name not in fitting]
    chosen = list(wanted) or ([] if lists else usual)
    beside = f"; {', '.join(lists)} holds lists, which only data.kind chat reads" if lists else ""
    told = _named(table)
    missing = [name for name in chosen if name not in table.column_names]
    unfit = [name for name in chosen if name not in (*fitting, *missing)]
    numbers = any(re.match("u?int|float", getattr(table.features[name], "dtype", "")) for name in unfit)
    mend = "set kind or columns" + "; where digits are text, write CSV as JSON or parquet" * numbers
    require(
        (
            1 <= len(chosen) <= at_most,
            f"columns must name {what} of {part.name}, got {chosen[:_NAMED]}; it has {told}{beside}; "
            f"set kind or columns",
        ),
        (not missing, f"columns must name columns of {part.name}, got {', '.join(missing)}; it has {told}"),
        (not unfit, f"columns must name {what} of {part.name}, got {', '.join(unfit)} of another type; {mend}"),
    )
    return chosen


def _named(table: Dataset) -> str:
    return first_of(table.column_names, _NAMED)


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")


def _is_ids(feature: Any) -> bool:
    return _is_list(feature) and "int" in str(getattr(getattr(feature, "feature", None), "dtype", ""))


def _is_list(feature: Any) -> bool:
    return isinstance(feature, list | dict) or type(feature).__name__ in ("List", "LargeList", "Sequence")


def _is_image(feature: Any) -> bool:
    if isinstance(feature, dict):
        return "bytes" in feature
    return type(feature).__name__ == "Image" or getattr(feature, "dtype", None) in ("binary", "large_binary")


def _arrow(table: Dataset, column: str) -> Any:
    return table.with_format("arrow")[:][column]


def _texts(table: Dataset, column: str, before: int = 0) -> list[str]:
    try:
        texts: list[str] = list(table[column])
    except UnicodeDecodeError as error:
        raise ModelError(f"column {column} must hold text in UTF-8, got other bytes: convert the file") from error
    bad = next((row for row, text in enumerate(texts, before) if not isinstance(text, str)), None)
    require((bad is None, f"column {column} must hold a text in every row, got none in row {bad}"))
    return texts


def _pictures(table: Dataset, column: str, part: Part) -> list[tuple[Picture, int | str]]:
    """The image files of a column, each with where it comes from: its row, or the path that the row names."""
    from datasets import Image

    if isinstance(table.features[column], Image):
        table = table.cast_column(column, Image(decode=False))
    values = _arrow(table, column).to_pylist()
    bad = next((row for row, value in enumerate(values) if _is_nothing(value)), None)
    require((bad is None, f"column {column} must hold an image in every row, got none in row {bad}"))
    homes = _homes(part)
    kept = (value if isinstance(value, bytes) else value["bytes"] for value in values)
    return [(file, row) if file else _read_file(values[row]["path"], homes, row) for row, file in enumerate(kept)]


def _homes(part: Part) -> list[Path]:
    """The folders in which a row may name a file: that of the source, and what the libraries keep."""
    import datasets
    from huggingface_hub import constants

    path = Path(part.name)
    own = [path if path.is_dir() else path.parent] if path.exists() else []
    kept = [Path(datasets.config.HF_DATASETS_CACHE), Path(constants.HF_HUB_CACHE)]
    return [*(folder.absolute() for folder in own), *(folder.resolve() for folder in (*own, *kept)), *kept]


def _read_file(name: str, homes: Sequence[Path], row: int) -> tuple[bytes, str]:
    """An image file that a row names, and its path. ModelError if it lies elsewhere, or is too large for an image."""
    path = Path(os.path.normpath(homes[0] / str(name)))
    if not any(path.is_relative_to(home) for home in homes):
        raise ModelError(
            f"an image must lie in the folder of its table, {homes[0]}, got {name} in row {row}; move it there"
        )
    try:
        about = path.stat()
    except (OSError, ValueError) as error:
        raise ModelError(f"an image must be a readable file, got {name} in row {row}: {error}") from error
    if not stat.S_ISREG(about.st_mode) or about.st_size > _LARGEST_FILE:
        raise ModelError(f"an image must be a file of at most {_LARGEST_FILE} bytes, got {name} in row {row}")
    return read_bytes(path), str(path)


def _is_nothing(value: Any) -> bool:
    return not (any(value.get(key) for key in ("bytes", "path")) if isinstance(value, dict) else value)


def _labels(table: Dataset, part: Part, column: str) -> tuple[Tensor, int, tuple[str, ...]]:
    """The labels, the number of classes, and their names."""
    told = _named(table)
    require((column in table.column_names, f"label must be a column of {part.name}, got {column!r}; it has {told}"))
    feature = table.features[column]
    values = _arrow(table, column)
    if values.null_count:
        missing = values.is_null().to_pylist().index(True)
        raise ModelError(f"column {column} must hold a label in every row, got none in row {missing}")
    kind = str(getattr(feature, "dtype", feature))
    said = f"column {column} must hold integers as labels, got {kind}; number the classes from 0"
    require((bool(re.fullmatch(r"u?int\d+", kind)), said))
    found = values.to_numpy()
    largest = int(found.max())
    declared = getattr(feature, "num_classes", None)
    num_labels = declared or largest + 1
    if declared is None and num_labels > max(_FEW_CLASSES, len(found)):
        raise ModelError(
            f"labels must number the classes from 0, got {largest} in row {int(found.argmax())} of column {column} of "
            f"{part.name}, which has {len(found)} rows; number the classes anew"
        )
    labels = torch.from_numpy(found.astype(np.int64))
    check_labels(labels, num_labels, f"column {column} of {part.name}")
    return labels, num_labels, tuple(getattr(feature, "names", None) or ())
