"""Data from a function of your own, `module:function`, which takes the name of a split.

It is called twice, and must return the same both times. Else a sample id would be another sample in another process,
after a resume and in `thinwire eval`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from thinwire.errors.calls import call
from thinwire.errors.imports import find
from thinwire.models.data.chats import conversation_of
from thinwire.models.data.parts import Columns, Conversation, Labelled, Part, check_labels
from thinwire.models.errors import ModelError, require

T = TypeVar("T")


def read_own(check: Callable[[str, Any], T], part: Part, columns: Columns) -> T:
    """The function's result for a split, as `check` of its name and the result gives it.

    Raises:
        ModelError: there is no such function, it fails, it gives something else, or another result the second time.
    """
    read = find(part.name, ModelError, "data")
    if not callable(read):
        raise ModelError(f"{part.name} must be a function that takes a split, got {type(read).__name__}")
    split = part.split or "test"  # what is named for evaluation, beside the data to train on

    def given() -> T:
        where = f"for the split {split!r}"
        returned = call(read, split, name=part.name, takes="one argument, the split", error=ModelError, where=where)
        return check(part.name, returned)

    first = _digest(_pieces(given()))  # a digest, so that the data are in memory once
    second = given()
    if _digest(_pieces(second)) != first:
        raise ModelError(
            f"{part.name} must return the same for split {split!r} at each call, and two calls gave different "
            "examples; seed what is random, and sort what comes in any order"
        )
    return second


def _digest(pieces: Iterator[bytes]) -> str:
    """The hash of pieces, and of where each ends."""
    hashed = hashlib.sha256()
    for piece in pieces:
        hashed.update(len(piece).to_bytes(8, "little"))
        hashed.update(piece)
    return hashed.hexdigest()


def _pieces(value: Any) -> Iterator[bytes]:
    """The bytes of examples, however they are nested."""
    if isinstance(value, torch.Tensor | np.ndarray):
        yield f"{value.dtype} {list(value.shape)}".encode()
        yield np.asarray(value).tobytes()
    elif is_dataclass(value):
        yield from _pieces(list(vars(value).values()))
    elif isinstance(value, list | tuple):
        yield str(len(value)).encode()
        for each in value:
            yield from _pieces(each)
    else:
        yield value if isinstance(value, bytes) else repr(value).encode()


def check_texts(name: str, returned: Any) -> list[str]:
    """The texts that a function returned. ModelError if they are something else."""
    instead = "; set data.kind to pairs or images for that" if isinstance(returned, Labelled) else ""
    require((isinstance(returned, list), f"{name} must return a list of texts, got {type(returned).__name__}{instead}"))
    _require_all(name, returned, lambda text: isinstance(text, str), "texts that are str")
    texts: list[str] = returned
    return texts


def check_chats(name: str, returned: Any) -> list[Conversation]:
    """The conversations that a function returned. ModelError if they are something else."""
    if not isinstance(returned, list) or not returned:
        raise ModelError(f"{name} must return a list of at least one conversation, got {_words(returned)}")
    return [
        conversation_of(given if isinstance(given, tuple) else (given,), f"index {index} of {name}")
        for index, given in enumerate(returned)
    ]


def check_pairs(name: str, returned: Any) -> Labelled:
    """The labelled texts that a function returned. ModelError if they are something else."""
    labelled = _check_labelled(name, returned)
    _require_all(name, labelled.examples, _is_pair, "examples that are tuples of one or two texts")
    lengths = sorted({len(example) for example in labelled.examples})
    require((len(lengths) < 2, f"{name} must return as many texts in each tuple, got one in some and two in others"))
    return labelled


def check_pictures(name: str, returned: Any) -> Labelled:
    """The labelled images that a function returned. ModelError if they are something else."""
    labelled = _check_labelled(name, returned)
    rule = "images that are uint8 arrays [H, W] or [H, W, C] with 1 or 3 channels, or the bytes of a file"
    _require_all(name, labelled.examples, _is_picture, rule)
    return labelled


def _check_labelled(name: str, returned: Any) -> Labelled:
    require((isinstance(returned, Labelled), f"{name} must return Labelled examples, got {type(returned).__name__}"))
    labelled: Labelled = returned
    examples, labels, num_labels, classes = labelled.examples, labelled.labels, labelled.num_labels, labelled.classes
    listed = isinstance(examples, list | tuple | np.ndarray) and len(examples) > 0
    named = isinstance(classes, tuple) and all(isinstance(each, str) for each in classes)
    fits = isinstance(labels, torch.Tensor) and labels.dtype == torch.int64 and labels.dim() == 1
    require(
        (listed, f"{name} must return a list of at least one example, got {_words(examples)}"),
        (fits, f"{name} must return labels as an int64 tensor [N], got {_words(labels)}; write torch.tensor(labels)"),
        (type(num_labels) is int, f"{name} must return num_labels as an int, got {_words(num_labels)}"),
        (
            not (listed and fits) or len(labels) == len(examples),
            f"{name} must return a label for each example, got {len(labels)} for {len(examples)}",
        ),
        (
            classes == () or (named and len({*classes}) == len(classes) == num_labels),
            f"{name} must return classes as a tuple of {num_labels} names that differ, or leave them out, got "
            f"{_words(classes)}",
        ),
    )
    check_labels(labels, num_labels, name)
    return labelled


def _is_pair(example: Any) -> bool:
    return isinstance(example, tuple) and len(example) in (1, 2) and all(isinstance(text, str) for text in example)


def _is_picture(example: Any) -> bool:
    if isinstance(example, np.ndarray):
        return example.dtype == np.uint8 and (example.ndim == 2 or (example.ndim == 3 and example.shape[2] in (1, 3)))
    return isinstance(example, bytes)


def _require_all(name: str, examples: Sequence[Any], fits: Callable[[Any], bool], rule: str) -> None:
    """Raise ModelError with the first example that does not fit."""
    bad = next((index for index, example in enumerate(examples) if not fits(example)), None)
    if bad is not None:
        raise ModelError(f"{name} must return {rule}, got {_words(examples[bad])} at index {bad}")


def _words(value: Any) -> str:
    """A value in a sentence: its type, and the value or its shape."""
    if isinstance(value, torch.Tensor | np.ndarray):
        kind = "tensor" if isinstance(value, torch.Tensor) else "array"
        return f"a {str(value.dtype).removeprefix('torch.')} {kind} {list(value.shape)}"
    said = repr(value)
    return f"{type(value).__name__} {said if len(said) <= 40 else said[:37] + '...'}"
