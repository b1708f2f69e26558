"""What is minimised. A task sums and counts; who knows the whole batch divides.

The loss of a step is the sum over its valid targets divided by their number in the WHOLE batch. The mean of micro-batch
means is another number wherever targets are masked unevenly, and NaN where a micro-batch has none.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

IGNORE = -100
"""The target that counts for nothing."""


class LanguageModeling:
    """Predict each next token: output [B, T, V] logits, target [B, T] token ids or `IGNORE`."""

    def loss_sum(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the summed cross-entropy of the valid targets, in nats: a float32 scalar, 0 where there is none."""
        logits = output.flatten(0, -2).float()
        return functional.cross_entropy(logits, target.flatten(), ignore_index=IGNORE, reduction="sum")

    def num_valid(self, target: Tensor) -> int:
        """Return how many targets count."""
        return int((target != IGNORE).sum())

    def perplexity(self, mean_loss: float) -> float:
        """Return e to the mean loss per token, infinite where that is beyond a float."""
        try:
            return math.exp(mean_loss)
        except OverflowError:
            return math.inf


def mask_padding(target: Tensor, valid: Tensor) -> Tensor:
    """Return the targets [B, ...] with `IGNORE` in the rows that `valid` [B] says are padding."""
    rows = valid.view(-1, *[1] * (target.dim() - 1))
    return torch.where(rows, target, IGNORE)
