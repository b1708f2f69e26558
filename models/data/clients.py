"""Clients that train in turn: which samples each of them has, and the samples of each step.

All are pure functions of seed and step, as in `sampler`. So a run with many clients needs no message for whose turn it
is, and no saved state to go on.

Clients with data of their own have one numbering of all samples, those of the first client first. Each process knows
the outlines of all; the process of the client whose turn it is has its samples.
"""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from thinwire.models.data.options import Shuffle
from thinwire.models.data.sampler import Batch, Sampler
from thinwire.models.data.samples import Data, Samples
from thinwire.models.errors import ModelError, require
from thinwire.models.seed import derive_seed


def divide(data: Data, count: int, division: str, seed: int) -> list[Tensor]:
    """The ids of each client's training samples, int64, in rising order; their numbers differ by one at most.

    `division` is "random" (by the seed), "label" (sorted by label; samples of one label in their order) or "order".

    Raises:
        ModelError: there are no labels to sort by.
    """
    if isinstance(data.training, JoinedSamples):
        return list(torch.arange(len(data.training)).split(data.training.sizes))
    ids = torch.arange(len(data.training))
    if division == "random":
        ids = torch.randperm(len(ids), generator=torch.Generator().manual_seed(derive_seed(seed, "clients")))
    elif division == "label":
        ids = _labels(data, ids).argsort(stable=True)
    return [piece.sort().values for piece in ids.tensor_split(count)]


def _labels(data: Data, ids: Tensor) -> Tensor:
    known = data.num_labels is not None and getattr(data.training, "labels", True) is not None
    if not known or data.training.targets(torch.arange(1)).dim() != 1:
        raise ModelError(
            "clients.division label needs the label of each sample in every process; take random or order, or for a "
            "server write the outline with thinwire outline --labels"
        )
    return data.training.targets(ids)


class JoinedSamples(Samples):
    """The samples of several clients as one. A process has those of one client at most, and outlines of the others.

    Data with side inputs has no outline, so there are none.
    """

    def __init__(self, clients: Sequence[Samples], own: int | None) -> None:
        self.sizes = [len(client) for client in clients]
        self.digest = hashlib.sha256(" ".join(client.digest for client in clients).encode()).hexdigest()
        self._clients, self._own = clients, own
        self._ends = list(accumulate(self.sizes))
        known = [client.lengths for client in clients if client.lengths is not None]
        self.lengths = torch.cat(known) if len(known) == len(clients) else None

    def __len__(self) -> int:
        return self._ends[-1]

    def inputs(self, ids: Tensor, epoch: int = 0) -> Tensor:
        """The inputs, as of the client that has them. ModelError if its turn is not that of this process's data."""
        if mistake := self.out_of_turn(ids):
            raise ModelError(mistake)
        client, own_ids = self._find(ids)
        return self._clients[client].inputs(own_ids, epoch)

    def out_of_turn(self, ids: Tensor) -> str | None:
        """A sentence if these samples are not those of the client in this process; None if it has no data."""
        client, _ = self._find(ids)
        if self._own in (None, client):
            return None
        return (
            f"this step is in the turn of client {client + 1}, and data.name are the data of client "
            f"{(self._own or 0) + 1}; start that client in its place, copy the folder of the newest turn, or end a "
            f"turn with training.steps"
        )

    def targets(self, ids: Tensor) -> Tensor:
        """The labels, int64 [B]."""
        client, own_ids = self._find(ids)
        return self._clients[client].targets(own_ids)

    def example(self, batch: int) -> Tensor:
        """The inputs of `batch` samples without data: a meta tensor."""
        return self._clients[0].example(batch)

    @property
    def first_here(self) -> int:
        """The first id whose inputs this process has; 0 if it has none."""
        return sum(self.sizes[: self._own or 0])

    def _find(self, ids: Tensor) -> tuple[int, Tensor]:
        """The client that has these samples, counted from 0, and their ids there."""
        client = bisect(self._ends, int(ids[0]))
        return client, ids - (self._ends[client] - self.sizes[client])


def some_ids(samples: Samples, count: int) -> Tensor:
    """The ids of `count` samples to try something on: the first ones, or the first of the client in this process."""
    first = samples.first_here if isinstance(samples, JoinedSamples) else 0
    return torch.arange(first, first + count)


def join(outlines: Sequence[Data], own: Data | None) -> Data:
    """The data of several clients as one, from their outlines.

    `own` are the data of the client in this process; None in a process without data.

    Raises:
        ModelError: the outlines do not fit together, or the data are those of none of them.
    """
    first = outlines[0]
    require(
        (
            all(_alike(outline) == _alike(first) for outline in outlines),
            "clients.outlines must describe samples of one shape, and the same number of classes or tokens",
        ),
        (
            len({outline.classes for outline in outlines if outline.classes}) < 2,
            "clients.outlines must list the same classes, by name, in one order; give each client a folder for each",
        ),
        (
            all(data.held_out_digest == first.held_out_digest for data in (*outlines, *filter(None, [own]))),
            "the data for evaluation must be the same for all clients; name them with data.evaluation, or take none "
            "with data.held_out 0",
        ),
    )
    digests = [outline.training.digest for outline in outlines]
    require(
        (
            len(set(digests)) == len(digests),
            "clients.outlines must describe other samples for each client, and two of them describe the same",
        ),
        (
            own is None or own.training.digest in digests,
            "data.name matches no client in clients.outlines; write its outline again",
        ),
    )
    index = None if own is None else digests.index(own.training.digest)
    parts = [own.training if own and index == at else outline.training for at, outline in enumerate(outlines)]
    return replace(own or first, training=JoinedSamples(parts, index))


def _alike(data: Data) -> tuple[object, ...]:
    example = data.training.example(1)
    return example.shape, example.dtype, data.num_labels, data.vocab_size


class Turns:
    """The batches of clients that train in turn, each through its own samples.

    A client goes on in its samples where its last turn ended. An epoch of the run has as many steps as one epoch of
    each client together. `clients` are the ids of each one's samples. `turn` gives the steps of a turn, from those of
    an epoch of that client.

    Attributes:
        steps_per_epoch: the number of steps in which each client goes once through its samples.
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
        if fewest < batch_size:
            raise ModelError(
                f"each client must have the {batch_size} samples of a step, and one of {len(clients)} has {fewest}; "
                f"lower clients.count, or pipeline.num_microbatches or microbatch_size"
            )
        self._ids = list(clients)
        self._samplers = [
            Sampler(len(ids), batch_size, derive_seed(seed, "client", client), shuffle)
            for client, ids in enumerate(clients)
        ]
        self.steps_per_epoch = sum(sampler.steps_per_epoch for sampler in self._samplers)
        self._lengths = [turn(sampler.steps_per_epoch) for sampler in self._samplers]
        self._ends = list(accumulate(self._lengths))

    def client(self, step: int) -> int:
        """The client whose turn a step belongs to, counted from 0."""
        return bisect(self._ends, step % self._ends[-1])

    def end(self, step: int) -> int:
        """The step after the turn that a step belongs to."""
        return step - step % self._ends[-1] + self._ends[self.client(step)]

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0 over all turns; its epoch is that of the client."""
        client, turns = self.client(step), step // self._ends[-1]
        begun = self.end(step) - self._lengths[client]
        found = self._samplers[client].batch(turns * self._lengths[client] + step - begun)
        return Batch(found.epoch, self._ids[client][found.ids], found.valid)
