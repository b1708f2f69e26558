"""Where data comes from: bundled, a file, a folder or the hub; read into texts, or into examples with a label each.

Tables (parquet, JSON, CSV), folders and hub names go through `datasets`, which keeps a copy in its cache that later
processes map instead of reading again. Bundled data and plain text files need neither it nor its import.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import attempt
from thinwire.errors.imports import find, is_path
from thinwire.models.errors import ModelError, require

if TYPE_CHECKING:
    from datasets import Dataset

PYDOC = "pydoc"
DIGITS = "digits"
_PARAGRAPH = 40
"""The fewest characters of a paragraph that is one."""
MAIN_SPLIT = "train"
"""The split of data that knows no splits: a single file, or what is bundled."""

_TABLES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
_FILES = {*_TABLES, ".txt", ".text", ".md", ".gz", ".zip", ".tar", ".png", ".jpg", ".jpeg"}
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_CIFAR10 = "cifar-10-batches-py"

Picture: TypeAlias = "bytes | np.ndarray[Any, Any]"
"""An image as it is stored: an encoded file, or uint8 pixels [H, W] or [H, W, C]."""


@dataclass(frozen=True)
class Place:
    """One part of one source."""

    name: str
    """`PYDOC`, `DIGITS`, the path of a file or folder, a name on the hub, or `module:function`, one's own."""
    split: str | None = MAIN_SPLIT
    """Null stands for "train", or else the only split there is."""
    subset: str | None = None
    """The configuration of a data set that has several: "cola" of GLUE."""


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
        """Return the examples of these ids, in that order."""
        return replace(self, examples=[self.examples[i] for i in ids], labels=self.labels[list(ids)])


def local_path(name: str, rule: str) -> Path | None:
    """Return the path that a name is, None if it can only be a name on the hub.

    Raises:
        ModelError: if there is no such file or folder, and no such name is possible on the hub.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if _HUB_NAME.fullmatch(name) and path.suffix.lower() not in _FILES:
        return None
    raise ModelError(f"{rule}, got {name!r}: no such file or folder")


def evaluation_place(training: Place, evaluation: str) -> Place:
    """Return the place that `evaluation` names: a bare word is another split of the training source.

    Whatever else it is, it is a source: "./test" is a path, where "test" is a split.
    """
    if re.fullmatch(r"\w+", evaluation):
        return replace(training, split=evaluation)
    return Place(evaluation, split=None)


def read_own(place: Place, returned: type[Any], meaning: str) -> Any:
    """What a function of one's own gives for a split; None where the place names no function.

    Raises:
        ModelError: if there is no such function, it fails, or it gives something else.
    """
    if not is_path(place.name):
        return None
    read = find(place.name, ModelError)
    require((callable(read), f"{place.name} must be a function that takes a split, got {type(read).__name__}"))
    assert callable(read)
    split = place.split or MAIN_SPLIT
    try:
        given = read(split)
    except Exception as error:
        raise ModelError(f"{place.name} failed for the split {split!r}: {type(error).__name__}: {error}") from error
    require((isinstance(given, returned), f"{place.name} must return {meaning}, got {type(given).__name__}"))
    return given


def read_texts(place: Place, columns: Sequence[str] = ()) -> list[str]:
    """Return the texts of a place, to be concatenated: the rows of a table, the lines of a file with their ends.

    Bytes of a file that are not UTF-8 become lone surrogates ("surrogateescape"). Two releases of Python have slightly
    different documentation: where several machines train, compare digests.

    Raises:
        ModelError: if it cannot be read, or has no such column of text.
    """
    if (own := read_own(place, list, "a list of texts")) is not None:
        return list(own)
    if place.name == PYDOC:
        from pydoc_data.topics import topics

        _require_no_split(place)
        return [topics[topic] for topic in sorted(topics)]
    path = local_path(place.name, _RULE_NAME)
    if path is not None and path.is_file() and path.suffix.lower() not in _TABLES:
        _require_no_split(place)
        text = _read(path).decode(errors="surrogateescape")
        return [line for line in re.split(r"(?<=\n)", text) if line]
    table = read_table(place)
    (column,) = _columns_of_text(table, place, columns or [name for name in ("text",) if name in table.column_names], 1)
    return _texts(table, column)


def read_pairs(place: Place, columns: Sequence[str], label: str) -> Labelled:
    """Return the texts of one or two columns, as tuples, and the labels.

    No columns stand for all that hold text, in the order of the table. Python's documentation is a source of its own:
    the halves of its paragraphs, of which every other pair is the wrong way round (label 0).

    Raises:
        ModelError: if the place cannot be read, or has no such columns; with all that is wrong with them.
    """
    if (own := read_own(place, Labelled, "Labelled examples")) is not None:
        return cast(Labelled, own)
    if place.name == PYDOC:
        _require_no_split(place)
        return _halves()
    table = read_table(place)
    texts, labels = attempt(
        lambda: [_texts(table, name) for name in _columns_of_text(table, place, columns, 2)],
        lambda: _labels(table, place, label),
    )
    return Labelled(list(zip(*texts, strict=True)), *labels)


def read_pictures(place: Place, columns: Sequence[str], label: str) -> Labelled:
    """Return the images of a column, not decoded, and the labels.

    No column stands for the only one that holds images. A folder with `cifar-10-batches-py` in it is CIFAR-10 as
    torchvision keeps it, its splits "train" and "test".

    Raises:
        ModelError: if the place cannot be read, or has no such columns; with all that is wrong with them.
    """
    if (own := read_own(place, Labelled, "Labelled examples")) is not None:
        return cast(Labelled, own)
    if place.name == DIGITS:
        _require_no_split(place)
        return _digits()
    path = local_path(place.name, _RULE_NAME)
    if path is not None and (path / _CIFAR10).is_dir():
        return _cifar10(path, place)
    table = read_table(place)
    pictures, labels = attempt(
        lambda: _pictures(table, _column_of_images(table, place, columns)), lambda: _labels(table, place, label)
    )
    return Labelled(pictures, *labels)


def read_table(place: Place) -> Dataset:
    """Return one split of a data set of rows.

    Raises:
        ModelError: if it cannot be read, has no such split, or no rows.
    """
    import datasets

    path = local_path(place.name, _RULE_NAME)
    if path is not None and path.is_file() and path.suffix.lower() not in _TABLES:
        known = ", ".join(_TABLES)
        raise ModelError(f"a file of examples must be one of {known}, or a folder or hub name, got {place.name!r}")
    try:
        with _quiet():
            splits = _load(place, path)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ModelError(f"{_RULE_NAME}, got {place.name!r}: {_reason(error)}") from error
    wanted = place.split or (next(iter(splits)) if len(splits) == 1 else MAIN_SPLIT)
    known = ", ".join(splits)
    require((wanted in splits, f"{place.name} must have the split {wanted!r}, or be given another: it has {known}"))
    table: Dataset = splits[wanted]
    require((len(table) > 0, f"there must be at least one row in split {wanted!r} of {place.name}, got none"))
    return table


_RULE_NAME = f"name must be {PYDOC!r}, {DIGITS!r}, a readable file or folder, or a data set on the hub"


def _load(place: Place, path: Path | None) -> dict[str, Dataset]:
    from datasets import load_dataset

    if path is None:
        return dict(load_dataset(place.name, place.subset))
    if path.is_file():
        return dict(load_dataset(_TABLES[path.suffix.lower()], place.subset, data_files=str(path)))
    if place.subset is None and _holds_text_alone(path):
        # as run_clm reads text: without the ends of lines, what is concatenated would be one word
        return dict(load_dataset("text", data_dir=str(path), keep_linebreaks=True))
    return dict(load_dataset(str(path), place.subset))


def _holds_text_alone(folder: Path) -> bool:
    suffixes = {path.suffix.lower() for path in folder.rglob("*") if path.is_file()}
    return ".txt" in suffixes and not suffixes & {*_TABLES, ".png", ".jpg", ".jpeg"}


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


def _require_no_split(place: Place) -> None:
    require(
        (
            place.split in (None, MAIN_SPLIT),
            f"{place.name} has no splits, got {place.split!r}; leave split as it is, and let evaluation be a path, "
            f"such as ./{place.split}, or null",
        )
    )


def _columns_of_text(table: Dataset, place: Place, wanted: Sequence[str], at_most: int) -> list[str]:
    number = "one column" if at_most == 1 else "one or two columns"
    return _columns(table, place, wanted, at_most, f"{number} of text", _is_text)


def _column_of_images(table: Dataset, place: Place, wanted: Sequence[str]) -> str:
    (column,) = _columns(table, place, wanted, 1, "one column of images", _is_image)
    return column


def _columns(
    table: Dataset, place: Place, wanted: Sequence[str], at_most: int, what: str, fits: Callable[[Any], bool]
) -> list[str]:
    """Return the wanted columns, or all that fit where none is named."""
    fitting = [name for name, feature in table.features.items() if fits(feature)]
    chosen = list(wanted) or fitting
    told = ", ".join(table.column_names)
    missing = [name for name in chosen if name not in table.column_names]
    unfit = [name for name in chosen if name not in (*fitting, *missing)]
    require(
        (
            1 <= len(chosen) <= at_most,
            f"columns must name {what} of {place.name}, got {chosen}; it has {told}; set kind or columns",
        ),
        (not missing, f"{place.name} must have the columns {wanted}, lacks {', '.join(missing)}; it has {told}"),
        (
            not unfit,
            f"columns must name {what} of {place.name}, got {', '.join(unfit)}, which hold something else; set kind or "
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
    return [value if isinstance(value, bytes) else value["bytes"] or _read(Path(value["path"])) for value in values]


def _is_nothing(value: Any) -> bool:
    return not (any(value.get(key) for key in ("bytes", "path")) if isinstance(value, dict) else value)


def _labels(table: Dataset, place: Place, column: str) -> tuple[Tensor, int]:
    """Return the labels, and how many classes there are."""
    told = ", ".join(table.column_names)
    require((column in table.column_names, f"{place.name} must have the label column {column!r}; it has {told}"))
    feature = table.features[column]
    kind = str(getattr(feature, "dtype", feature))
    require((bool(re.fullmatch(r"u?int\d+", kind)), f"column {column} must hold integers as labels, got {kind}"))
    values = list(table[column])
    missing = next((row for row, value in enumerate(values) if value is None), None)
    require((missing is None, f"column {column} must hold a label in every row, got none in row {missing}"))
    labels = torch.tensor(values, dtype=torch.int64)
    num_labels = getattr(feature, "num_classes", None) or int(labels.max()) + 1
    check_labels(labels, num_labels, f"column {column} of {place.name}")
    return labels, num_labels


def check_labels(labels: Tensor, num_labels: int, where: str) -> None:
    """Raise `ModelError` with the first label that is none of 0..num_labels - 1."""
    bad = ((labels < 0) | (labels >= num_labels)).nonzero().flatten().tolist()
    got = f"{int(labels[bad[0]])} in row {bad[0]}" if bad else ""
    require((not bad, f"labels must lie in 0..{num_labels - 1}, got {got} of {where}"))


def _halves() -> Labelled:
    """The paragraphs of Python's documentation in two halves each, every other pair the wrong way round."""
    from pydoc_data.topics import topics

    paragraphs = [" ".join(part.split()) for name in sorted(topics) for part in topics[name].split("\n\n")]
    halves = [_halved(paragraph.split(" ")) for paragraph in dict.fromkeys(paragraphs) if len(paragraph) >= _PARAGRAPH]
    labels = torch.arange(len(halves)) % 2
    examples = [pair if label else pair[::-1] for pair, label in zip(halves, labels.tolist(), strict=True)]
    return Labelled(examples, labels, 2)


def _halved(words: Sequence[str]) -> tuple[str, str]:
    middle = len(words) // 2
    return " ".join(words[:middle]), " ".join(words[middle:])


def _digits() -> Labelled:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ModelError(f"{DIGITS!r} needs scikit-learn: pip install 'thinwire[digits]'") from error
    found = load_digits()
    pixels = (found.images * (255 / 16)).round().astype(np.uint8)  # stored as 0..16
    return Labelled(list(pixels), torch.from_numpy(found.target).long(), 10)


def _cifar10(folder: Path, place: Place) -> Labelled:
    from torchvision.datasets import CIFAR10

    splits = {"train": True, "test": False}
    wanted = place.split or MAIN_SPLIT
    require((wanted in splits, f"{place.name} is CIFAR-10, its splits are train and test, got {wanted!r}"))
    try:
        found = CIFAR10(str(folder), train=splits[wanted])
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{_RULE_NAME}, got {place.name!r}: {_reason(error)}") from error
    return Labelled(list(found.data), torch.tensor(found.targets), len(found.classes))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{_RULE_NAME}, got {str(path)!r}: {error.strerror or error}") from error


def _reason(error: BaseException) -> str:
    """What went wrong, in one line; `datasets` tells the cause of its own errors only as their cause."""
    return " ".join(str(error.__cause__ or error).split())
