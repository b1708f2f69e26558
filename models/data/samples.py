"""The data of a run: numbered samples to train on and to evaluate on, and their task."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from thinwire.models.tasks import Task


class Samples(Protocol):
    """Numbered samples: ids are 0..len - 1, and mean the same in every process and epoch."""

    digest: str
    """SHA-256, in hex, of all the samples; stages compare it to make sure that they read the same."""

    def __len__(self) -> int:
        """The number of samples."""

    def inputs(self, ids: Tensor, epoch: int = 0) -> Tensor:
        """What the first stage reads, for int64 ids [B]: tokens int64 [B, T], or pixels float32 [B, C, H, W]."""

    def targets(self, ids: Tensor) -> Tensor:
        """What the loss compares with: int64 [B, T] or [B]."""

    def side(self, ids: Tensor) -> dict[str, Tensor]:
        """Inputs that any stage may read by sample id: for pairs attention_mask and token_type_ids, int64 [B, T]."""

    def example(self, batch: int) -> Tensor:
        """The inputs of so many samples, without data: a meta tensor."""

    def side_example(self, batch: int) -> dict[str, Tensor]:
        """The side inputs of so many samples, without data."""


@dataclass(frozen=True)
class Data:
    """Samples, task, and what the model must know of them."""

    training: Samples
    held_out: Samples | None
    task: Task
    num_labels: int | None = None
    """The number of classes; None for text."""
    vocab_size: int | None = None
    """One more than the largest token the tokenizer can give; None for images."""
    notes: tuple[str, ...] = ()
    """Sentences to print at the start of a run."""
