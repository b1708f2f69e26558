"""An outline of data: what a process must know of samples that it never reads, as a file of JSON.

In split learning the samples stay with their owner. The other processes of the run need their number, the shape of an
input, and the digest that shows that all speak of the same data. They read these from an outline, and open no data.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.errors.files import SIGNATURE, read_object
from thinwire.models.data.samples import Data, Samples
from thinwire.models.errors import ModelError, require
from thinwire.models.tasks import Classification, LanguageModeling

FORMAT = "thinwire outline 2"
"""The first field of the file; another number is another format."""
_MOST = 2**27
"""The most samples, and the most elements of one: every process shuffles numbers of all, and has room for a batch."""


@dataclass(frozen=True, kw_only=True)
class PartOutline:
    """What the outline holds of the training samples, or of those for evaluation."""

    count: int
    digest: str
    """SHA-256 of all samples."""
    shape: list[int]
    """The shape of one sample's input."""
    dtype: str
    """The type of its elements, such as float32."""
    labels: list[int] | None = None
    """The label of each sample, if the one who reads the outline is to have the labels."""
    lengths: list[int] | None = None
    """The tokens of each sample before its padding, where there is any. Whoever gets frames sees them."""

    def __post_init__(self) -> None:
        whole = [self.count, *self.shape, *(self.labels or []), *(self.lengths or [])]
        if not all(type(number) is int and number >= 0 for number in whole) or not isinstance(self.digest, str):
            raise TypeError("count, shape and labels must be whole numbers, and digest a text")
        if max(self.count, math.prod(self.shape)) > _MOST:
            raise ValueError(f"count and the elements of a sample must be at most {_MOST}")
        for name, values in (("labels", self.labels), ("lengths", self.lengths)):
            if values is not None and len(values) != self.count:
                raise TypeError(f"there are {len(values)} {name} for {self.count} samples")


class OutlinedSamples(Samples):
    """Samples that are elsewhere. They have ids, and labels if the outline has them; no inputs, and no side inputs."""

    def __init__(self, outline: PartOutline) -> None:
        self.digest = outline.digest
        self._outline = outline
        self.labels = None if outline.labels is None else torch.tensor(outline.labels)
        self.lengths = None if outline.lengths is None else torch.tensor(outline.lengths)

    def __len__(self) -> int:
        return self._outline.count

    def inputs(self, ids: Tensor, epoch: int = 0) -> Tensor:
        """Nothing: an outline has no inputs, and no process asks it for any."""
        raise AssertionError("only the process of the first stage reads inputs, and it has the data")

    def targets(self, ids: Tensor) -> Tensor:
        """The labels, int64 [B]."""
        assert self.labels is not None, "read_outline has made sure"
        return self.labels[ids]

    def check_labels(self, num_labels: int | None) -> None:
        """Raise TypeError if there is a label that is not below `num_labels`."""
        if self.labels is not None and int(self.labels.max()) >= (num_labels or 0):
            raise TypeError(f"a label must be below {num_labels}, got {int(self.labels.max())}")

    def example(self, batch: int) -> Tensor:
        """The inputs of `batch` samples without data: a meta tensor."""
        return torch.empty(batch, *self._outline.shape, dtype=getattr(torch, self._outline.dtype), device="meta")


def outline_text(data: Data, *, labels: bool) -> str:
    """The outline of data, as JSON; with `labels`, the label of each sample as well.

    Raises:
        ModelError: other stages need more of these data than an outline may hold.
    """
    require(
        (
            not data.training.side_example(1),
            "data of kind pairs or tags, or of kind chat with packing, have no outline: every stage reads masks or "
            "positions that come with the texts",
        ),
        (
            not labels or data.num_labels is not None,
            "--labels needs data with labels; of text, the targets are the text itself",
        ),
    )
    parts = {"training": data.training, "held_out": data.held_out}
    told = {name: None if part is None else asdict(_outline(part, labels=labels)) for name, part in parts.items()}
    values = {
        "generator": SIGNATURE,
        "format": FORMAT,
        "num_labels": data.num_labels,
        "vocab_size": data.vocab_size,
        "classes": data.classes,
        "date": data.date,
        **told,
    }
    return json.dumps(signed(values)) + "\n"


def signed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with their SHA-256: a label that changed on the way would train, because its reader has no samples."""
    fields = {name: value for name, value in values.items() if name != "sha256"}
    return {**fields, "sha256": hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()}


def _outline(samples: Samples, *, labels: bool) -> PartOutline:
    example, lengths = samples.example(1), samples.lengths
    return PartOutline(
        count=len(samples),
        digest=samples.digest,
        shape=list(example.shape[1:]),
        dtype=str(example.dtype).removeprefix("torch."),
        labels=samples.targets(torch.arange(len(samples))).tolist() if labels else None,
        lengths=None if lengths is None else lengths.tolist(),
    )


def read_outline(path: str, *, labels: bool, option: str = "data.outline") -> Data:
    """The data of an outline, without their samples; `option` is the one that names the file.

    Raises:
        ModelError: there is no such file, it is no outline, or it has no `labels` where they are needed.
    """
    rule = f"{option} must be a file that thinwire outline wrote, got {path}"
    try:
        values = read_object(Path(path).resolve())
    except (OSError, ValueError) as error:
        raise ModelError(f"{rule}: {error}") from error
    require((values.get("format") == FORMAT, f"{rule}: its format is not {FORMAT!r}"))
    require((values == signed(values), f"{rule}: it is damaged (its fields have another SHA-256)"))
    try:
        training = OutlinedSamples(PartOutline(**values["training"]))
        held_out = None if values["held_out"] is None else OutlinedSamples(PartOutline(**values["held_out"]))
        num_labels, vocab_size = values["num_labels"], values["vocab_size"]
        classes, date = tuple(map(str, values["classes"])), values.get("date")
        for part in (training, held_out):
            if part is not None:
                part.example(1)
                part.check_labels(num_labels)
        task = LanguageModeling() if num_labels is None else Classification(num_labels)
        if classes and len(classes) != num_labels:
            raise TypeError(f"there are names of {len(classes)} classes for {num_labels}")
        if type(vocab_size) not in (int, type(None)) or not isinstance(date, str | None):
            raise TypeError("vocab_size must be a whole number or null, and date a text or null")
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, RuntimeError) as error:
        raise ModelError(f"{rule}: it is damaged ({error})") from error
    if labels and any(part is not None and part.labels is None for part in (training, held_out)):
        written = "write it with thinwire outline --labels, or " if num_labels is not None else ""
        raise ModelError(
            f"{option} must have labels for the process of the last stage, and {path} has none; {written}take a "
            "schedule that brings the last stage back to the first process, such as zbv-zero-bubble"
        )
    return Data(training, held_out, task, num_labels=num_labels, vocab_size=vocab_size, classes=classes, date=date)
