"""The samples of each training step, as a pure function of the step. Every stage computes the same ids by itself.

So stages know the sample ids of every micro-batch without a message, and a run can be resumed without a saved state of
the sampler.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.models.data.options import Shuffle
from thinwire.models.seed import derive_seed


@dataclass(frozen=True, eq=False)
class Batch:
    """The samples of one step, B of them."""

    epoch: int
    """The epoch, counted from 0."""
    ids: Tensor
    """The sample ids, int64 [B]; each valid id comes once."""
    valid: Tensor
    """Which ids count, bool [B]; the others only fill the shape."""


class Sampler:
    """Gives every sample once per epoch. Seed and epoch decide the order; a last batch that is not full is dropped.

    Args:
        num_samples: the ids are 0..num_samples - 1.
        batch_size: samples of a batch, a multiple of the pieces.
        seed: that of the order.
        shuffle: when the order changes.
        pieces: each batch is so many pieces in a row, of the same length. A sample always comes in the same piece: with
            two, one of samples 0 and 1, drawn by the seed, in the first one, one of 2 and 3, and so on. So a replica
            keeps its samples, and has some of each kind where kinds come by turns.

    Attributes:
        steps_per_epoch: the number of full batches in the data.
    """

    def __init__(
        self, num_samples: int, batch_size: int, seed: int, shuffle: Shuffle = "epoch", pieces: int = 1
    ) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.steps_per_epoch = num_samples // batch_size
        self.seed = seed
        self.shuffle = shuffle
        self._pieces = pieces
        self._places = self._draw_places()
        self._order: tuple[int, list[Tensor]] = (-1, [])

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0 over all epochs. It does not depend on earlier calls."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            self._order = (epoch, [self._compute_part(epoch, part) for part in range(self._pieces)])
        size = self.batch_size // self._pieces
        ids = torch.cat([order[index * size : (index + 1) * size] for order in self._order[1]])
        return Batch(epoch, ids, torch.ones(self.batch_size, dtype=torch.bool))

    def _draw_places(self) -> Tensor:
        """The place of each sample among as many in a row as there are pieces, int64 [N]; of one piece all are 0."""
        if self._pieces == 1:
            return torch.zeros(self.num_samples, dtype=torch.int64)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "pieces"))
        drawn = torch.rand(-(-self.num_samples // self._pieces), self._pieces, generator=generator)
        return drawn.argsort(1).view(-1)[: self.num_samples]

    def _compute_part(self, epoch: int, part: int) -> Tensor:
        """The ids of a piece in their order."""
        ids = (self._places == part).nonzero().view(-1)
        if self.shuffle == "never":
            return ids
        purpose = ("epoch", 0 if self.shuffle == "once" else epoch, *(("part", part) if part else ()))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, *purpose))
        return ids[torch.randperm(len(ids), generator=generator)]


def evaluation_batches(num_samples: int, batch_size: int) -> Iterator[Batch]:
    """An iterator over all samples in order, in batches of one shape.

    The last batch is filled up with ids from the start of the data; `valid` is false for them.
    """
    positions = (torch.arange(start, start + batch_size) for start in range(0, num_samples, batch_size))
    return (Batch(0, position % num_samples, position < num_samples) for position in positions)
