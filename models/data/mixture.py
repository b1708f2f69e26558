"""Samples of several sources as one, each source with its share: a source may come several times in a pass.

The samples and their order are as numbered as those of one source, so every epoch and a resume see the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from thinwire.models.data.samples import Data, Samples


class MixedSamples(Samples):
    """The samples of several parts. Sample i is row `rows[i]` of part `sources[i]`; both are int64 [N]."""

    def __init__(self, parts: Sequence[Samples], sources: Tensor, rows: Tensor) -> None:
        self.parts, self.sources, self.rows = parts, sources, rows
        hashed = [*(part.digest for part in parts), *map(str, (sources.tolist(), rows.tolist()))]
        self.digest = hashlib.sha256(" ".join(hashed).encode()).hexdigest()
        known = [part.lengths for part in parts if part.lengths is not None]
        if len(known) == len(parts):
            starts = torch.tensor([0, *map(len, known)]).cumsum(0)
            self.lengths = torch.cat(known)[starts[sources] + rows]

    def __len__(self) -> int:
        return len(self.rows)

    def inputs(self, ids: Tensor, epoch: int = 0) -> Tensor:
        """The inputs of samples `ids` [B]."""
        return self._gather(ids, lambda part, own: part.inputs(own, epoch))

    def targets(self, ids: Tensor) -> Tensor:
        """The targets of samples `ids` [B]."""
        return self._gather(ids, lambda part, own: part.targets(own))

    def side(self, ids: Tensor) -> dict[str, Tensor]:
        """The side inputs of samples `ids` [B]; all parts have the same."""
        return {name: self._gather(ids, partial(_side, name)) for name in self.parts[0].side_example(1)}

    def example(self, batch: int) -> Tensor:
        """The inputs of `batch` samples without data: a meta tensor."""
        return self.parts[0].example(batch)

    def _gather(self, ids: Tensor, read: Callable[[Samples, Tensor], Tensor]) -> Tensor:
        sources, rows = self.sources[ids], self.rows[ids]
        found = {index: read(self.parts[index], rows[sources == index]) for index in sources.unique().tolist()}
        first = next(iter(found.values()))
        result = first.new_empty(len(ids), *first.shape[1:])
        for index, values in found.items():
            result[sources == index] = values
        return result


def _side(name: str, part: Samples, ids: Tensor) -> Tensor:
    return part.side(ids)[name]


def mix(parts: Mapping[str, Data], shares: Sequence[float]) -> Data:
    """The data of sources of one kind as one, by their names; each gives its share of the samples to train on.

    A pass has as many samples as let each source come once as a whole. The others begin anew meanwhile, as in
    `interleave_datasets` of the library datasets until all are exhausted; here shares are exact, and each source is
    spread evenly over the pass. The held-out samples are all that the sources have, once.
    """
    first, training = next(iter(parts.values())), [data.training for data in parts.values()]
    whole = max(len(samples) / share for samples, share in zip(training, shares, strict=True))
    counts = [round(whole * share) for share in shares]
    sources, rows = _in_a_row(training, counts)
    places = torch.cat([(torch.arange(count) + 0.5) / count for count in counts])
    order = places.argsort(stable=True)
    times = ", ".join(
        f"{name} {count / len(samples):.3g} times" for name, count, samples in zip(parts, counts, training, strict=True)
    )
    held_out = [data.held_out for data in parts.values() if data.held_out]
    return replace(
        first,
        training=MixedSamples(training, sources[order], rows[order]),
        held_out=MixedSamples(held_out, *_in_a_row(held_out, [*map(len, held_out)])) if held_out else None,
        vocab_size=max(data.vocab_size or 0 for data in parts.values()),
        ends=frozenset().union(*(data.ends for data in parts.values())),
        notes=(*(note for data in parts.values() for note in data.notes), f"a pass has {len(order)} samples: {times}"),
    )


def _in_a_row(parts: Sequence[Samples], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The part and the row of each sample where so many of each part follow each other, some several times."""
    rows = torch.cat([torch.arange(count) % len(samples) for count, samples in zip(counts, parts, strict=True)])
    return torch.arange(len(parts)).repeat_interleave(torch.tensor(counts)), rows
