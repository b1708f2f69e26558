"""Data in local files that are not tables: plain text, and CIFAR-10 in torchvision's format."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from pathlib import Path

import torch

from thinwire.models.data.parts import TABLES, Columns, Labelled, Part, require_no_split, split_of
from thinwire.models.errors import ModelError, require
from thinwire.models.first_bytes import not_text

_CIFAR10 = "cifar-10-batches-py"


def is_text_file(name: str) -> bool:
    """Whether a name is the path of a file that is not a table."""
    path = Path(name)
    return path.is_file() and path.suffix.lower() not in TABLES


def read_lines(part: Part, columns: Columns) -> list[str]:
    """The lines of a file with their line ends, without a byte order mark.

    Bytes that are not UTF-8 become lone surrogates ("surrogateescape").
    """
    require_no_split(part)
    path = Path(part.name)
    require_text(path)
    text = read_bytes(path).removeprefix(BOM_UTF8).decode(errors="surrogateescape")
    return [line for line in re.split(r"(?<=\n)", text) if line]


def require_text(path: Path) -> None:
    """Raise ModelError if the first bytes of a file are not those of text."""
    try:
        said = not_text(path)
    except OSError as error:
        raise ModelError(f"{path} must be a readable file: {error.strerror or error}") from error
    require((said is None, f"{path} must hold text, and is {said}"))


def holds_cifar10(name: str) -> bool:
    """Whether a name is the path of a folder that holds CIFAR-10."""
    return (Path(name) / _CIFAR10).is_dir()


def read_cifar10(part: Part, columns: Columns) -> Labelled:
    """The images of CIFAR-10: 32 x 32 pixels, in colour. The splits are "train" and "test"."""
    from torchvision.datasets import CIFAR10

    splits = {"train": True, "test": False}
    split = split_of(part, splits)
    try:
        images = CIFAR10(part.name, train=splits[split])
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{part.name} must be a readable CIFAR-10: {' '.join(str(error).split())}") from error
    return Labelled(list(images.data), torch.tensor(images.targets), len(images.classes), tuple(images.classes))


def read_bytes(path: Path) -> bytes:
    """The content of a file; ModelError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} must be a readable file: {error.strerror or error}") from error
