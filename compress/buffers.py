"""The buffers that feedback keeps for one tensor at one end of its channel, and which of them a pass uses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire.compress.codebook import Codebook
from thinwire.compress.codec import CodecError
from thinwire.compress.entries import EXTRA
from thinwire.compress.feedback import Method
from thinwire.compress.microbatch import Microbatch, PassKind
from thinwire.compress.stores.store import Loan, Store, StoreLayout

Purpose = Literal["train", "eval", "codebook"]
"""What a store is for. Where evaluation has buffers of its own, they are in a second store. A codebook has one too."""

MakeStore = Callable[[StoreLayout, Purpose], Store]


@dataclass(frozen=True, kw_only=True)
class SlotCounts:
    """How many slots there are of each kind: the size of every store."""

    positions: int
    """Rows of a batch, all accumulation passes together."""
    samples: int = 0
    """Samples to train on."""
    evaluation_samples: int = 0
    """Samples that an evaluation scores; with those that only fill up its passes, if they have ids of their own."""


class Buffers:
    """Stores of one tensor at one end, each made at its first use.

    Args: as for Coder; `row_shape` is the tensor's without its first dimension, `sends` says which end this is,
    `predicts` whether a codebook predicts its rows.
    """

    def __init__(
        self,
        method: Method,
        row_shape: tuple[int, ...],
        *,
        sends: bool,
        counts: SlotCounts,
        make_store: MakeStore,
        warmup_fill: bool,
        predicts: bool,
    ) -> None:
        self._method, self._row_shape, self._counts, self._make_store = method, row_shape, counts, make_store
        feedback = method.feedback
        self._kept = feedback if feedback is not None and (sends or feedback.receiver_keeps) else None
        self._warmup_fill = warmup_fill
        self.stores: dict[Purpose, Store] = {}
        """The stores made so far."""
        self._entries: Loan | None = None
        self.codebook: Codebook | None = None
        """The entries that predict rows; None if nothing does."""
        if predicts:
            self.codebook = Codebook(row_shape[-1], self._table, self._table_changed)

    @cached_property
    def layouts(self) -> dict[Purpose, StoreLayout]:
        """The stores this end may fill, with their sizes."""
        found: dict[Purpose, StoreLayout] = {}
        if self.codebook is not None:
            row = (self.codebook.width + EXTRA,)
            found["codebook"] = StoreLayout(num_slots=self._method.entries, row_shape=row)
        if self._kept is None:
            return found
        counts: dict[Purpose, int] = {"train": self._counts.positions}
        if self._kept.slot == "sample":
            counts["train"] = self._counts.samples
            if self._kept.receiver_keeps and self._kept.remembers_evaluation:
                counts["eval"] = self._counts.evaluation_samples
        return found | {
            purpose: StoreLayout(num_slots=count, row_shape=self._row_shape, bits=self._kept.store_bits)
            for purpose, count in counts.items()
            if count
        }

    def used_by(self, kind: PassKind) -> tuple[Store | None, bool]:
        """The store that a kind of pass reads, and whether it writes there."""
        feedback = self._kept
        if feedback is None or kind == "eval-off":
            return None, False
        if kind == "train":
            return self.store("train"), True
        if not feedback.receiver_keeps:
            return None, False
        if kind == "warmup":
            return (self.store("train"), True) if self._warmup_fill else (None, False)
        if feedback.slot == "position":
            return self.store("train"), False
        return (self.store("eval"), True) if feedback.remembers_evaluation else (None, False)

    def slots(self, microbatch: Microbatch) -> Tensor:
        """Each row's slot, int64 [R]; CodecError if there is none, or the micro-batch has no sample ids for it."""
        if self._kept is None or self._kept.slot == "position":
            if self._kept is not None and microbatch.positions.stop > self._counts.positions:
                raise CodecError(
                    f"{self._method} keeps a buffer for each position in a batch, and has {self._counts.positions}, "
                    f"but a pass reaches position {microbatch.positions.stop}; give the samples between two optimizer "
                    f"steps with Wire(slots=SlotCounts(positions=...))"
                )
            return torch.arange(microbatch.positions.start, microbatch.positions.stop)
        if microbatch.sample_ids is None:
            raise CodecError(
                f"{self._method} keeps a buffer for each sample: give the stages sample ids, with "
                f"stage.begin(Pass(sample_ids=...)) before each pass"
            )
        return microbatch.sample_ids

    def store(self, purpose: Purpose) -> Store:
        """The store of a purpose; CodecError where it has no slots."""
        if purpose not in self.stores:
            if purpose not in self.layouts:
                raise CodecError(
                    f"{self._method} needs a slot for each sample, got none: give the number of samples with "
                    f"Wire(slots=SlotCounts(..., {'samples' if purpose == 'train' else 'evaluation_samples'}=...))"
                )
            self.stores[purpose] = self._make_store(self.layouts[purpose], purpose)
        return self.stores[purpose]

    def prefetch(self, microbatch: Microbatch) -> None:
        """Announce a micro-batch, so that its rows can be read ahead."""
        store = None if microbatch.kind == "warmup" else self.used_by(microbatch.kind)[0]  # there rows go in full
        if store is not None:
            store.prefetch(self.slots(microbatch))

    def digests(self) -> dict[str, str]:
        """A hash of each buffer that both ends keep, by purpose and slot, and one of a codebook."""
        both = self._kept is not None and self._kept.receiver_keeps
        found = {
            f"{purpose} slot {slot}": digest
            for purpose, store in self.stores.items()
            if purpose != "codebook" and both
            for slot, digest in store.digests().items()
        }
        if "codebook" in self.stores:
            found["codebook"] = hashlib.sha256(self._table().cpu().numpy().data).hexdigest()
        return found

    def state_dict(self) -> dict[str, Any]:
        """The content of every store, for a checkpoint."""
        return {purpose: store.state_dict() for purpose, store in self.stores.items()}

    def load_state_dict(self, state: Mapping[Purpose, Any]) -> None:
        """Set every store to the content that `state_dict` returned."""
        self._entries = None
        for purpose in self.stores.keys() - state.keys():
            self.stores.pop(purpose).close()
        for purpose, saved in state.items():
            self.store(purpose).load_state_dict(saved)

    def _table(self) -> Tensor:
        """The entries of the codebook, zeros at first, float32; they may be changed in place."""
        if self._entries is None:
            store = self.store("codebook")
            every = torch.arange(store.layout.num_slots)
            if not store.known(every).all():
                store.write(every, torch.zeros(len(every), *store.layout.row_shape, device=store.device))
            self._entries = store.borrow(every)
        (table,) = self._entries.parts
        return table

    def _table_changed(self) -> None:
        if self._entries is not None:
            self.stores["codebook"].keep(self._entries)

    def flush(self) -> None:
        """Wait until all written buffers are in their medium; StoreError if one is not."""
        for store in self.stores.values():
            store.flush()

    def close(self) -> None:
        """Close the stores."""
        for store in self.stores.values():
            store.close()
