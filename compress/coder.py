"""One tensor of one channel, at one end: what its rows are sent as at each moment, and the state that takes.

A row is one sample's part of a micro-batch. At each moment some rows go in full (warm-up, first visits, evaluation with
compression off) and the others through the method:

    payload = | full rows, in the tensor's own dtype | codec's payload of the other rows as one tensor |

Both ends decide alike, from the moment and the slots they have seen, before a byte is sent. Buffers are written from
the decoded payload at both ends, never from the encoder's intermediates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire.compress.codec import CodecError, Key, tensor_bytes
from thinwire.compress.codecs.cast import Uncompressed, saturating_copy
from thinwire.compress.feedback import Method
from thinwire.compress.stores.store import Loan, Store, StoreLayout

Mode = Literal["train", "warmup", "eval", "off"]
Purpose = Literal["train", "eval"]
MakeStore = Callable[[StoreLayout, Purpose], Store]


@dataclass(frozen=True, eq=False)
class Moment:
    """When a message crosses, as both ends know it without asking.

    Modes: ``train`` through the method; ``warmup`` in full, filling buffers; ``eval`` through the method, training's
    buffers untouched; ``off`` in full, nothing touched.
    """

    mode: Mode
    positions: Tensor
    """Each row's slot in the batch, int64 [R]: (accumulation pass * micro-batches + micro-batch) * R + row."""
    samples: Tensor | None = None
    """Each row's sample id, int64 [R]; None where nobody said."""


@dataclass(frozen=True, kw_only=True)
class SlotCounts:
    """How many slots there are of each kind: the bound on every store."""

    positions: int
    samples: int = 0
    evaluation_samples: int = 0


@dataclass(frozen=True, eq=False)
class Route:
    """What happens to one message: which rows go in full, and which store is read, and written, for the others."""

    full: Tensor
    """bool [R]."""
    slots: Tensor
    """int64 [R]: each row's slot in the store."""
    store: Store | None
    """The buffers of the coded rows; None where the codec works on its own."""
    writes: bool
    """Whether the buffers are updated."""

    @cached_property
    def num_full(self) -> int:
        """How many rows go in full."""
        return sum(self.full.tolist())

    @property
    def num_coded(self) -> int:
        """How many rows do not."""
        return self.full.shape[0] - self.num_full

    def in_full(self, rows: Tensor) -> Tensor:
        """Return those of ``rows`` [R, ..] that go in full."""
        return rows[self.full] if self.num_coded else rows

    def coded(self, rows: Tensor) -> Tensor:
        """Return those of ``rows`` [R, ..] that do not go in full."""
        return rows[~self.full] if self.num_full else rows


@dataclass(frozen=True, eq=False)
class Trace:
    """Where an activation's values went, for the gradient that comes back."""

    full: Tensor
    """Which rows went in full, bool [R]."""
    places: Tensor | None
    """The positions of the others, int64 [rows, k]; None if there were none."""


class Coder:
    """Encodes or decodes one tensor of one channel, and keeps what its method must remember.

    Args:
        method: the codec, or feedback around one.
        example: shape [R, ..] and dtype of the tensor.
        sends: whether this is the sending end.
        counts: how many slots there are.
        make_store: called at first use of a store.
        warmup_fill: whether warm-up writes what is sent in full into the buffers.
        companion: for ``reuse``, the coder of the activation at this same end.

    Raises:
        CodecError: ``reuse`` without topk or randk on the activation, or feedback by sample without sample ids.
    """

    def __init__(
        self,
        method: Method,
        example: Tensor,
        *,
        sends: bool,
        counts: SlotCounts,
        make_store: MakeStore,
        warmup_fill: bool = True,
        companion: Coder | None = None,
    ) -> None:
        self.method, self._shape, self._dtype = method, tuple(example.shape), example.dtype
        self._feedback, self._codec = method.feedback, method.inner
        self._companion: Coder | None = None
        if self._codec.reuses_indices:
            self._codec = self._codec.bound_to(companion.method.codec if companion else Uncompressed())
            self._companion = companion
        self._sends, self._counts, self._make_store, self._warmup_fill = sends, counts, make_store, warmup_fill
        self._stores: dict[Purpose, Store] = {}
        self._sides: dict[int, Tensor] = {}
        self._traces: dict[int, Trace] | None = None
        if self._companion is not None:
            self._companion._traces = {}
        self._sent: tuple[Route, Tensor | None, Loan | None] | None = None

    # --- planning -------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Rows of the tensor."""
        return self._shape[0] if self._shape else 1

    def nbytes(self, moment: Moment) -> int:
        """The payload's exact size at a moment."""
        return self._size(self.full_rows(moment))

    def full_rows(self, moment: Moment) -> int:
        """How many rows go in full at a moment."""
        return self._route(moment).num_full

    @property
    def capacity(self) -> int:
        """The largest payload there can be."""
        return max(self._size(full) for full in range(self.rows + 1))

    @property
    def layouts(self) -> dict[Purpose, StoreLayout]:
        """The stores this end may fill, with their sizes."""
        feedback = self._feedback
        if feedback is None or not (self._sends or feedback.receiver_keeps):
            return {}
        counts: dict[Purpose, int] = {"train": self._counts.positions}
        if feedback.slot == "sample":
            counts["train"] = self._counts.samples
            if feedback.receiver_keeps and feedback.remembers_evaluation:
                counts["eval"] = self._counts.evaluation_samples
        return {
            purpose: StoreLayout(num_slots=count, row_shape=self._shape[1:], bits=feedback.store_bits)
            for purpose, count in counts.items()
            if count
        }

    def prefetch(self, moment: Moment) -> None:
        """Announce a micro-batch, so that its buffers can be read ahead."""
        purpose, _ = self._purpose(moment)
        if purpose is not None and moment.mode in ("train", "eval"):
            self._store(purpose).prefetch(self._slots(moment))

    # --- sending ----------------------------------------------------------------------------------------------------

    def encode(self, x: Tensor, out: Tensor, key: Key, moment: Moment) -> None:
        """Write the payload of ``x`` into ``out``, uint8 [nbytes]; `settle` must follow."""
        route = self._route(moment)
        split = self._full_bytes(route)
        message = loan = None
        if route.num_full:
            out[:split] = tensor_bytes(route.in_full(x))
        if route.num_coded:
            rows, side = route.coded(x), self._side(moment)
            if route.store is None:
                self._codec.encode(rows.to(self._coded_dtype), out[split:], key, side)
            else:
                assert self._feedback is not None
                loan = route.store.borrow(route.coded(route.slots))
                rows = rows.reshape(self._shape_of(route.num_coded))
                message = self._feedback.encode(rows, loan, out[split:], key, side)
        self._trace(route, out[split:], key, moment)
        self._sent = (route, message, loan)

    def settle(self, x: Tensor, payload: Tensor, key: Key, moment: Moment) -> None:
        """Update what this end remembers, after `encode`; the message may be on its way already."""
        assert self._sent is not None, "settle follows encode"
        (route, message, loan), self._sent = self._sent, None
        coded = payload[self._full_bytes(route) :]
        self._fill(route, x)
        if message is not None and loan is not None and route.writes:
            assert route.store is not None and self._feedback is not None
            # What both ends compute needs no more than the payload says, so the decoded takes the message's place.
            decoded = message if self._feedback.receiver_keeps else torch.empty_like(message)
            self._codec.decode(coded, decoded, key, self._side(moment))
            for u, c, buffer in zip(loan.split(message), loan.split(decoded), loan.parts, strict=True):
                self._feedback.advance(u, c, buffer)
            route.store.keep(loan)
        self._done(coded, route, moment)

    # --- receiving --------------------------------------------------------------------------------------------------

    def decode(self, payload: Tensor, out: Tensor, key: Key, moment: Moment) -> None:
        """Write the tensor that the payload stands for into ``out``, contiguous, and update what is remembered."""
        route = self._route(moment)
        split = self._full_bytes(route)
        coded = payload[split:]
        if route.num_full:
            rows = torch.empty(self._shape_of(route.num_full), dtype=self._dtype)
            tensor_bytes(rows).copy_(payload[:split])
            _put(out, route.full, rows)
            self._fill(route, out)
        if route.num_coded:
            in_place = not route.num_full and out.dtype == self._coded_dtype
            shape = self._shape_of(route.num_coded)
            rows = out.detach().view(shape) if in_place else torch.empty(shape, dtype=self._coded_dtype)
            self._codec.decode(coded, rows, key, self._side(moment))
            if route.store is not None:
                self._receive(rows, route, route.store)
            if not in_place:
                _put(out, ~route.full, rows)
        self._trace(route, coded, key, moment)
        self._done(coded, route, moment)

    # --- state --------------------------------------------------------------------------------------------------------

    def digests(self) -> dict[str, str]:
        """A hash of every buffer that both ends keep, by purpose and slot."""
        if self._feedback is None or not self._feedback.receiver_keeps:
            return {}
        return {
            f"{purpose} slot {slot}": digest
            for purpose, store in self._stores.items()
            for slot, digest in store.digests().items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything remembered, for a checkpoint."""
        return {
            "stores": {purpose: store.state_dict() for purpose, store in self._stores.items()},
            "sides": dict(self._sides),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember what `state_dict` returned, exactly."""
        self._sides = dict(state["sides"])
        for purpose in self._stores.keys() - state["stores"].keys():
            self._stores.pop(purpose).close()
        for purpose, saved in state["stores"].items():
            self._store(purpose).load_state_dict(saved)

    def flush(self) -> None:
        """Wait until every buffer written has reached its medium; StoreError if one could not."""
        for store in self._stores.values():
            store.flush()

    def drop_cache(self) -> None:
        """Have stores on disk be read from there again, as if memory were full of other things."""
        for store in self._stores.values():
            store.drop_cache()

    def close(self) -> None:
        """Give up the stores."""
        for store in self._stores.values():
            store.close()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _size(self, full: int) -> int:
        """The payload's size when `full` rows go in full."""
        rest = self._shape[1:]
        in_full = full * prod(rest) * self._dtype.itemsize
        if full == self.rows:
            return prod(self._shape) * self._dtype.itemsize
        coded_dtype = torch.float32 if self._feedback else self._dtype
        return in_full + self._codec.nbytes((self.rows - full, *rest) if self._shape else (), coded_dtype)

    def _full_bytes(self, route: Route) -> int:
        return route.num_full * prod(self._shape[1:]) * self._dtype.itemsize

    def _shape_of(self, rows: int) -> tuple[int, ...]:
        return (rows, *self._shape[1:])

    def _route(self, moment: Moment) -> Route:
        """Decide, from what both ends know, what happens at a moment."""
        slots = self._slots(moment)
        if moment.mode == "off":
            return Route(self._mask(True), slots, None, writes=False)
        purpose, writes = self._purpose(moment)
        store = self._store(purpose) if purpose else None
        if moment.mode == "warmup":
            return Route(self._mask(True), slots, store, writes=writes)
        if self._companion is not None:
            return Route(self._companion.trace(moment).full, slots, None, writes=False)
        opens = store is not None and self._feedback is not None and self._feedback.opens_in_full
        full = ~store.known(slots) if opens and store is not None else self._mask(False)
        return Route(full, slots, store, writes)

    def _mask(self, value: bool) -> Tensor:
        return torch.full((self.rows,), value)

    def _purpose(self, moment: Moment) -> tuple[Purpose | None, bool]:
        """Which store a moment uses, and whether it writes there."""
        feedback = self._feedback
        if feedback is None or not (self._sends or feedback.receiver_keeps):
            return None, False
        if moment.mode == "train":
            return "train", True
        if not feedback.receiver_keeps:
            return None, False
        if moment.mode == "warmup":
            return ("train", True) if self._warmup_fill else (None, False)
        if feedback.slot == "position":
            return "train", False
        return ("eval", True) if feedback.remembers_evaluation else (None, False)

    def _slots(self, moment: Moment) -> Tensor:
        if self._feedback is None or self._feedback.slot == "position":
            return moment.positions
        if moment.samples is None:
            raise CodecError(f"{self.method} keeps a buffer for each sample: give the stages sample ids")
        return moment.samples

    def _store(self, purpose: Purpose) -> Store:
        if purpose not in self._stores:
            layouts = self.layouts
            if purpose not in layouts:
                raise CodecError(
                    f"{self.method} has no slot to keep anything in: tell the wire how many samples there are"
                )
            self._stores[purpose] = self._make_store(layouts[purpose], purpose)
        return self._stores[purpose]

    def _receive(self, rows: Tensor, route: Route, store: Store) -> None:
        """Turn decoded rows into what the receiver uses, in place, and remember it."""
        assert self._feedback is not None
        loan = store.borrow(route.coded(route.slots))
        for part, buffer in zip(loan.split(rows), loan.parts, strict=True):
            self._feedback.receive(part, buffer)
            if route.writes:
                buffer.copy_(part)
        if route.writes:
            store.keep(loan)

    def _fill(self, route: Route, x: Tensor) -> None:
        """A row that goes in full is what the next difference is taken against."""
        if route.store is not None and route.writes and route.num_full:
            rows = route.in_full(x).reshape(self._shape_of(route.num_full))
            route.store.write(route.in_full(route.slots), rows.float())

    def trace(self, moment: Moment) -> Trace:
        """Where the values of a micro-batch of this activation went; kept for the companion until `forget`."""
        assert self._traces is not None, "nobody asked for traces"
        return self._traces[int(moment.positions[0])]

    def forget(self, moment: Moment) -> None:
        """The gradient has been coded: its activation's trace is needed no more."""
        assert self._traces is not None, "nobody asked for traces"
        self._traces.pop(int(moment.positions[0]), None)

    def _trace(self, route: Route, coded: Tensor, key: Key, moment: Moment) -> None:
        if self._traces is None or moment.mode != "train":
            return
        rows = self._shape_of(route.num_coded)
        places = self._codec.indices(coded, rows, self._coded_dtype, key) if route.num_coded else None
        self._traces[int(moment.positions[0])] = Trace(route.full, places)

    def _side(self, moment: Moment) -> Tensor | None:
        """What the codec is told beside the tensor: an activation's positions for reuse, the warm Q for lowrank."""
        if self._companion is not None:
            return self._companion.trace(moment).places
        return self._sides.get(int(moment.positions[0])) if len(moment.positions) else None

    def _done(self, coded: Tensor, route: Route, moment: Moment) -> None:
        """Keep the codec's next side, and let go of the companion's trace."""
        if self._companion is not None:
            self._companion.forget(moment)
        if moment.mode == "train" and not route.num_full:
            side = self._codec.next_shared(coded, self._shape, self._coded_dtype)
            if side is not None:
                self._sides[int(moment.positions[0])] = side

    @property
    def _coded_dtype(self) -> torch.dtype:
        return torch.float32 if self._feedback else self._dtype


def _put(out: Tensor, mask: Tensor, rows: Tensor) -> None:
    if mask.all():
        saturating_copy(rows.view(out.shape), out)
    else:
        written = torch.empty(rows.shape, dtype=out.dtype)
        saturating_copy(rows, written)
        out[mask] = written
