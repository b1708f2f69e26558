"""Clients that train in turn: which samples each of them has, and the samples of each step.

All are pure functions of seed and step, as in `sampler`. So a run with many clients needs no message for whose turn it
is, and no saved state to go on.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from thinwire.models.data.options import Shuffle
from thinwire.models.data.sampler import Batch, Sampler
from thinwire.models.data.samples import Data
from thinwire.models.errors import require
from thinwire.models.seed import derive_seed


def divide(data: Data, count: int, division: str, seed: int) -> list[Tensor]:
    """The ids of each client's training samples, int64, in rising order; their numbers differ by one at most.

    Args:
        data: the samples of all clients.
        count: number of clients.
        division: "random" (by the seed), "label" (sorted by label; samples of one label in their order) or "order".
        seed: that of the run.

    Raises:
        ModelError: there are no labels to sort by.
    """
    ids = _ORDERS[division](data, seed)
    return [piece.sort().values for piece in ids.tensor_split(count)]


def _random(data: Data, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed(seed, "clients"))
    return torch.randperm(len(data.training), generator=generator)


def _by_label(data: Data, seed: int) -> Tensor:
    require(
        (
            data.num_labels is not None and getattr(data.training, "has_labels", True),
            "clients.division label needs the label of each sample in every process; take random or order, or for a "
            "server write the outline with thinwire outline --labels",
        )
    )
    return data.training.targets(torch.arange(len(data.training))).argsort(stable=True)


def _in_order(data: Data, seed: int) -> Tensor:
    return torch.arange(len(data.training))


_ORDERS: dict[str, Callable[[Data, int], Tensor]] = {"random": _random, "label": _by_label, "order": _in_order}


class Turns:
    """The batches of clients that train in turn, each through its own samples.

    A client goes on in its samples where its last turn ended. An epoch of the run has as many steps as one epoch of
    each client together.

    Args:
        clients: the ids of each client's samples.
        batch_size: samples of a step.
        seed: that of the order.
        shuffle: when the order of a client's samples changes.
        turn: the steps of a turn, from those of an epoch of that client.
    """

    def __init__(
        self,
        clients: Sequence[Tensor],
        batch_size: int,
        seed: int,
        *,
        shuffle: Shuffle = "epoch",
        turn: Callable[[int], int] = lambda steps: steps,
    ) -> None:
        fewest = min(map(len, clients))
        require(
            (
                fewest >= batch_size,
                f"a client must have the samples of a step, which are {batch_size}, and one of {len(clients)} has "
                f"{fewest}; lower clients.count, or pipeline.num_microbatches or microbatch_size",
            )
        )
        self._ids = list(clients)
        self._samplers = [
            Sampler(len(ids), batch_size, derive_seed(seed, "client", client), shuffle)
            for client, ids in enumerate(clients)
        ]
        self._lengths = [turn(sampler.steps_per_epoch) for sampler in self._samplers]
        self._ends = list(accumulate(self._lengths))

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in which each client goes once through its samples."""
        return sum(sampler.steps_per_epoch for sampler in self._samplers)

    def client(self, step: int) -> int:
        """The client whose turn a step belongs to, counted from 0."""
        return bisect(self._ends, step % self._ends[-1])

    def end(self, step: int) -> int:
        """The step after the turn that a step belongs to."""
        return step - step % self._ends[-1] + self._ends[self.client(step)]

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0 over all turns; its epoch is that of the client."""
        require((step >= 0, f"step must be at least 0, got {step}"))
        client, turns = self.client(step), step // self._ends[-1]
        begun = self.end(step) - self._lengths[client]
        found = self._samplers[client].batch(turns * self._lengths[client] + step - begun)
        return Batch(found.epoch, self._ids[client][found.ids], found.valid)
