"""The data of a run: numbered samples for training and evaluation, and their task."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from thinwire.models.tasks import Task


class Samples(Protocol):
    """Numbered samples. Ids are 0..len - 1; an id is the same sample in every process and epoch."""

    digest: str
    """SHA-256, in hex, of all samples. Stages compare it to check that they read the same data."""
    lengths: Tensor | None = None
    """The tokens of each sample before its padding, int64 [len], where there is any."""

    def __len__(self) -> int:
        """The number of samples."""

    def inputs(self, ids: Tensor, epoch: int = 0) -> Tensor:
        """The inputs of the first stage for ids int64 [B]: tokens int64 [B, T], or pixels float32 [B, C, H, W]."""

    def targets(self, ids: Tensor) -> Tensor:
        """The targets of the loss: tokens int64 [B, T], or labels int64 [B]."""

    def side(self, ids: Tensor) -> dict[str, Tensor]:
        """Side inputs, which any stage may read: for pairs attention_mask and token_type_ids, int64 [B, T]."""
        return {}

    def example(self, batch: int) -> Tensor:
        """The inputs of `batch` samples without data: a meta tensor."""

    def side_example(self, batch: int) -> dict[str, Tensor]:
        """`side` for `batch` samples without data: meta tensors."""
        one = self.side(torch.zeros(1, dtype=torch.int64))
        return {name: each.new_empty(batch, *each.shape[1:], device="meta") for name, each in one.items()}


class TokenRows(Samples):
    """Samples of T tokens, a row each, with labels and side inputs beside them. The id of a sample is its row."""

    def __init__(self, tokens: Tensor, labels: Tensor, side: Mapping[str, Tensor]) -> None:
        """`tokens` [N, T], `labels` [N] or [N, T], and each of `side` [N, T] are integers of any width."""
        self.tokens, self.labels, self._side = tokens, labels, side

    def __len__(self) -> int:
        return len(self.tokens)

    def inputs(self, ids: Tensor, epoch: int = 0) -> Tensor:
        """The tokens of samples `ids` [B]: int64 [B, T], the same in every epoch."""
        return self.tokens[ids].long()

    def targets(self, ids: Tensor) -> Tensor:
        """The labels, int64 [B] or [B, T]."""
        return self.labels[ids].long()

    def side(self, ids: Tensor) -> dict[str, Tensor]:
        """The side inputs by name, int64 [B, T] each."""
        return {name: tensor[ids].long() for name, tensor in self._side.items()}

    def example(self, batch: int) -> Tensor:
        """The inputs of `batch` samples without data: int64 [batch, T] on the meta device."""
        return torch.empty(batch, self.tokens.shape[1], dtype=torch.int64, device="meta")


@dataclass(frozen=True)
class Data:
    """Samples, their task, and the sizes that the model must fit."""

    training: Samples
    held_out: Samples | None
    task: Task
    num_labels: int | None = None
    """The number of classes; None for text."""
    vocab_size: int | None = None
    """One more than the largest token that the tokenizer can give, or that is in the data; None for images."""
    classes: tuple[str, ...] = ()
    """The names of the classes, by number; empty if the source names none."""
    ends: frozenset[tuple[int, ...]] = frozenset()
    """The tokens that end answers of conversations: of each answer, those in a row."""
    date: str | None = None
    """The date that the chat template wrote, as in 2026-11-29; None if it asks for none."""
    notes: tuple[str, ...] = ()
    """Sentences to print at the start of a run."""

    @property
    def held_out_digest(self) -> str | None:
        """The digest of the samples for evaluation; None if there are none."""
        return None if self.held_out is None else self.held_out.digest
