"""Where a model comes from: found once, and asked for all that is known of it before a stage is built."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, Self

import torch

from thinwire.models.checkpoint import open_checkpoint
from thinwire.models.data.options import DataOptions
from thinwire.models.data.samples import Data
from thinwire.models.errors import ModelError, require
from thinwire.models.layers import Blueprint
from thinwire.models.options import FRESH, ModelOptions
from thinwire.models.tasks import TaskName

_OTHERS = {"text": "a language model or a classifier of text", "images": "a vision model such as resnet18"}
"""What reads data of a kind."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """What is asked of a model: its task, and the data that it has to read."""

    task: TaskName
    num_labels: int | None = None
    """The classes of the data; None for a language model."""
    vocab_size: int | None = None
    """Tokens are below this number; None where data have no tokens, or are not known."""
    block_size: int | None = None
    """The tokens of a sample. Costs depend on it."""
    packed: bool = False
    """Whether a sample holds several texts."""
    channels: int | None = None
    """The channels of images; None for other data."""
    step_tokens: int = 0
    """The tokens of a step, in the replica with the fewest. They decide whether a tied head stays one weight."""

    @classmethod
    def of(cls, options: DataOptions, data: Data, rows: int) -> Use:
        """What data ask of a model that is to train on so many rows of them in a step."""
        common, samples = cls(task=options.task, num_labels=data.num_labels), data.training
        if data.vocab_size is None:
            return replace(common, channels=samples.example(1).shape[1])
        return replace(
            common,
            vocab_size=data.vocab_size,
            block_size=options.block_size,
            packed="position_ids" in samples.side_example(1),
            step_tokens=rows * options.block_size,
        )

    @property
    def kind(self) -> Literal["text", "images"] | None:
        """What the model has to read, as far as it is known."""
        return "images" if self.channels is not None else None if self.vocab_size is None else "text"


@dataclass(frozen=True)
class ModelSource:
    """A model that was found. A subclass for each place that models come from says how it becomes layers.

    `find_model` makes one, and raises a ModelError for a model or a configuration that does not exist.
    """

    reads: ClassVar[Literal["text", "images"] | None] = None
    """The kind of data that the model reads; None where only its own code knows."""
    options: ModelOptions

    @classmethod
    def of(cls, options: ModelOptions) -> Self:
        """The model by its name; nothing is made yet. ModelError with an adapter."""
        must = "model.lora needs a language model or a classifier of text, by its name or folder"
        require((options.lora.rank is None, f"{must}, got {options.name}"))
        return cls(options)

    @property
    def parameters(self) -> int | None:
        """The parameters of the whole model; None if only building it shows them. Those of a new head may lack.

        Raises:
            ModelError: its library refuses the configuration.
        """
        raise NotImplementedError

    @property
    def left_to_tokenizer(self) -> list[str]:
        """The fields of its configuration that its tokenizer knows: the defaults of a type are for another one."""
        return []

    def code(self, num_labels: int | None) -> str:
        """Lines of Python that make the unsplit model as the variable `model`; empty where transformers loads it."""
        return ""

    def note_on_tokenizer(self, tokenizer: str) -> str | None:
        """A sentence if pretrained weights know other tokens than those of the data's tokenizer; None if not."""
        return None

    def blueprint(self, use: Use) -> Blueprint:
        """The model in layers.

        Raises:
            ModelError: the model does not do this task or read these data, or its library refuses the configuration.
        """
        self._check_reads(use)
        dtype = torch.float32 if self.options.dtype == "fp32" else torch.bfloat16
        made = replace(self._layers(use), weights_dtype=dtype)
        _check_fits(made, use)
        return made

    def _layers(self, use: Use) -> Blueprint:
        raise NotImplementedError

    def _check_reads(self, use: Use) -> None:
        name, reads, kind = self.options.name, self.reads, use.kind
        require(
            (
                None in (reads, kind) or reads == kind,
                f"{name} reads {reads}, but the data are {kind}; take {_OTHERS.get(kind or '')}, or set data.kind",
            ),
            (
                reads != "images" or kind != "images" or use.channels == 3,
                f"{name} reads images of 3 channels, got {use.channels}; set data.channels to 3",
            ),
        )


def with_weights(made: Blueprint, options: ModelOptions) -> Blueprint:
    """The same model with the weights in a folder, which has them by the names of this model.

    Raises:
        ModelError: there is no such folder.
    """
    if options.weights == FRESH:
        return made
    if not Path(options.weights).is_dir():
        raise ModelError(
            f"weights must be {FRESH} or a folder with model.safetensors for {options.name!r}, got {options.weights!r}"
        )
    return replace(made, checkpoint=open_checkpoint(options.weights))


def _check_fits(model: Blueprint, use: Use) -> None:
    """Raise ModelError, with a sentence for each, if data have more tokens or longer samples than a model reads."""
    tokens, readable = use.vocab_size or 0, model.vocab_size
    length, longest = use.block_size or 0, model.max_positions
    larger = "set weights: fresh, or enlarge the model with resize_token_embeddings of transformers and save it"
    wider = f", or {'raise vocab_size in config' if model.checkpoint is None else larger}"
    require(
        (
            readable is None or tokens <= readable,
            f"the model's vocab_size must be at least the tokenizer's {tokens}, got {readable}; take the model's own "
            f"tokenizer{wider}",
        ),
        (
            longest is None or length <= longest,
            f"block_size must be at most the model's {longest} positions, got {length}",
        ),
    )
