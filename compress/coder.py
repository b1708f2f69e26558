"""One tensor of one channel, at one end: an Encoder where it leaves, a Decoder where it arrives.

A row is one sample's part of a micro-batch. In each pass some rows go in full (warm-up, first visits, evaluation with
compression off) and the others through the method:

    payload = | full rows, in the tensor's own dtype | codec's payload of the other rows as one tensor |

First visits may go through a codec of their own instead (`aqsgd(.., first=q(8))`).

Both ends make the same plan of a message, from the micro-batch and the slots they have seen. Encoding, decoding and
the update of the buffers all follow it. Both ends write buffers from the decoded payload, never from the encoder's
intermediates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from thinwire.compress.buffers import Buffers, MakeStore, SlotCounts
from thinwire.compress.codebook import predicts
from thinwire.compress.codec import Codec, CodecError, Key, is_finite, size_of
from thinwire.compress.codecs.cast import Uncompressed, saturating_copy
from thinwire.compress.feedback import Feedback, Method
from thinwire.compress.microbatch import Microbatch, PassKind
from thinwire.compress.plan import MessagePlan, Rows
from thinwire.compress.stores.store import Loan
from thinwire.compress.transfer import put

_NO_SLOTS = torch.empty(0, dtype=torch.int64)
_IN_FULL: Codec = Uncompressed()
NOT_FINITE = "a payload must hold finite numbers, got NaN or infinity"


class SentIndices(NamedTuple):
    """Where the values of one micro-batch of an activation are: a gradient is sent at the same indices (`reuse`)."""

    rows: Rows
    """Which rows were sent in full."""
    indices: Tensor | None
    """The indices of the other rows' values, int64 [rows, k]; None if all rows went in full."""


class Coder:
    """The part that both ends of a tensor's channel share: the plan of a message, and the state.

    Args:
        method: the codec, or feedback around one.
        example: shape [R, ..] and dtype of the tensor.
        counts: how many slots there are.
        make_store: called at first use of a store.
        warmup_fill: whether warm-up writes the rows sent in full into the buffers.
        activation: for a codec that reuses indices, the coder of the activation at this same end.

    Raises:
        CodecError: the method is `reuse`, and the activation has neither topk nor randk, or it is feedback, and the
            tensor is complex.
    """

    sends: ClassVar[bool]
    """Whether this is the sending end."""

    def __init__(
        self,
        method: Method,
        example: Tensor,
        *,
        counts: SlotCounts,
        make_store: MakeStore,
        warmup_fill: bool = True,
        activation: Coder | None = None,
    ) -> None:
        self.method, self._shape, self._dtype = method, tuple(example.shape), example.dtype
        self._feedback = method.feedback
        self.codec = method.inner.bound_to(activation.method.inner if activation else Uncompressed())
        """The codec of this channel, as it is used."""
        self._coded_dtype = torch.float32 if self._feedback else self._dtype
        if self._feedback and self._dtype.is_complex:
            raise CodecError(f"{method} keeps buffers of real numbers, got {self._dtype}; send this tensor with none")
        self._opening = self._feedback.opening if self._feedback else None
        self.varies = self.codec.varies or (self._opening is not None and self._opening.varies)
        """Whether a payload may be shorter than its plan."""
        self.rows = self._shape[0] if self._shape else 1
        self._every = Rows(torch.ones(self.rows, dtype=torch.bool), self.rows)
        self._none = Rows(torch.zeros(self.rows, dtype=torch.bool), 0)
        self._recurring: dict[tuple[PassKind, int | None], MessagePlan] = {}
        self._index_memory: dict[int, SentIndices] | None = None
        self._reused: dict[int, SentIndices] | None = None
        if method.codec.reuses_indices:
            assert activation is not None, "bound_to raises without an activation"
            self._reused = activation.index_memory()
        # what both ends keep of a row has one shape, whatever is padding in it
        self._whole = self._feedback is not None or self._reused is not None
        self.buffers = Buffers(
            method,
            self._shape[1:],
            sends=self.sends,
            counts=counts,
            make_store=make_store,
            warmup_fill=warmup_fill,
            predicts=predicts(method.entries, self._shape),
        )
        self._predicting = self._trained(self.codec)

    def index_memory(self) -> dict[int, SentIndices]:
        """Record the indices of this activation's values in training from now on, for `reuse`.

        They are kept by the position of a micro-batch's first row, until the gradient at the same end is coded.
        """
        self._index_memory, self._whole = {}, True
        self._recurring.clear()
        return self._index_memory

    def plan(self, microbatch: Microbatch) -> MessagePlan:
        """The plan of a micro-batch; both ends make the same one, before either updates its buffers."""
        known = microbatch.kind, microbatch.length
        if known in self._recurring:
            return self._recurring[known]
        plan = self._plan(microbatch)
        if plan.recurs:
            self._recurring[known] = plan
        return plan

    def _plan(self, microbatch: Microbatch) -> MessagePlan:
        store, writes = self.buffers.used_by(microbatch.kind)
        slots = _NO_SLOTS if store is None else self.buffers.slots(microbatch)
        rows, shared, opening = self._none, None, _IN_FULL
        if microbatch.kind in ("warmup", "eval-off"):
            rows = self._every
        elif self._reused is not None:
            rows, shared = self._reused[microbatch.positions.start]
        elif store is not None and self._opening is not None:
            rows, opening = self._in_full(~store.known(slots)), self._opening
            if microbatch.kind == "train":
                opening = self._trained(opening)
        row = self._row(microbatch)
        full_bytes, coded_bytes = self._sizes(opening, rows.num_full, row)
        return MessagePlan(
            rows=rows,
            opening=opening,
            full_bytes=full_bytes,
            nbytes=full_bytes + coded_bytes,
            slots=slots,
            store=store,
            writes=writes,
            shared=shared,
            learns=self._learns(microbatch, rows, opening),
            row=row,
            remembered=microbatch if self._whole else None,
        )

    def used(self, payload: Tensor, plan: MessagePlan) -> int:
        """How many bytes of a payload [plan.nbytes] are sent: all but what its last part does not use."""
        if plan.rows.num_coded:
            return plan.full_bytes + self.codec.used(plan.coded(payload))
        return plan.opening.used(payload)

    @property
    def capacity(self) -> int:
        """Bytes of the largest possible payload."""
        openings = (_IN_FULL, *([self._opening] if self._opening else []))
        return max(sum(self._sizes(each, full, self._shape[1:])) for each in openings for full in range(self.rows + 1))

    def state_dict(self) -> dict[str, Any]:
        """The whole state, for a checkpoint."""
        return {"rule": self._rule, "stores": self.buffers.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the state to what `state_dict` returned; an empty one is that before the first message.

        Raises CodecError if it is that of another rule of feedback.
        """
        if state and (saved := state["rule"]) != self._rule:
            raise CodecError(f"the state must be of the same rule of feedback, {self._rule}, got {saved}")
        self.buffers.load_state_dict(state["stores"] if state else {})

    def _learns(self, microbatch: Microbatch, rows: Rows, opening: Codec) -> bool:
        """Whether a message goes through the codec that has the codebook, in training."""
        used = (rows.num_full and opening.entries) or (rows.num_coded and self.codec.entries)
        return bool(used) and microbatch.kind == "train" and self.buffers.codebook is not None

    def _trained(self, codec: Codec) -> Codec:
        """A codec as training uses it: with the codebook. So an evaluation has one score, whatever was learned."""
        return codec if self.buffers.codebook is None else codec.predicting(self.buffers.codebook)

    def _codec_for(self, plan: MessagePlan) -> Codec:
        """The codec of the coded rows."""
        return self._predicting if plan.learns else self.codec

    def _learn(self, plan: MessagePlan) -> None:
        """Update the codebook by the message that was encoded or decoded last."""
        if plan.learns:
            assert self.buffers.codebook is not None, "_learns asks for it"
            self.buffers.codebook.learn()

    @property
    def _rule(self) -> str:
        """Which rule of feedback its buffers belong to, and what each is kept for."""
        return f"{self._feedback.name} by {self._feedback.slot}" if self._feedback else "no feedback"

    def _row(self, microbatch: Microbatch) -> tuple[int, ...]:
        """The shape of a row as it crosses."""
        row = self._shape[1:]
        if self._whole or microbatch.length is None or not row:
            return row
        return (min(microbatch.length, row[0]), *row[1:])

    def _sizes(self, opening: Codec, num_full: int, row: tuple[int, ...]) -> tuple[int, int]:
        """Bytes of the rows in full, which `opening` sends, and of those that the codec sends."""
        num_coded = self.rows - num_full
        coded_shape = (num_coded, *row) if self._shape else ()
        return (
            size_of(opening, (num_full, *row), self._dtype) if num_full else 0,
            size_of(self.codec, coded_shape, self._coded_dtype) if num_coded else 0,
        )

    def _in_full(self, full: Tensor) -> Rows:
        num_full = sum(full.tolist())
        return {0: self._none, self.rows: self._every}.get(num_full) or Rows(full, num_full)

    def _opened(self, plan: MessagePlan, payload: Tensor, key: Key) -> Tensor:
        """The rows in full, as they arrive."""
        values = torch.empty((plan.rows.num_full, *plan.row), dtype=self._dtype, device=payload.device)
        plan.opening.decode(payload[: plan.full_bytes], values, key)
        return values

    def _fill(self, plan: MessagePlan, rows: Tensor) -> None:
        """Write rows that go in full into the buffers: the next difference is taken against them."""
        assert plan.store is not None, "only feedback has buffers"
        values = rows.reshape((plan.rows.num_full, *plan.row)).float()
        plan.store.write(plan.rows.in_full(plan.slots), values.to(plan.store.device))

    def _borrow(self, plan: MessagePlan, device: torch.device) -> Loan:
        """The buffers of the coded rows on a device; copies, if the store is elsewhere."""
        assert plan.store is not None, "only feedback has buffers"
        slots = plan.rows.coded(plan.slots)
        if plan.store.device.type == device.type:
            return plan.store.borrow(slots)
        return Loan(slots, (plan.store.read(slots).to(device),))

    def _shared(self, plan: MessagePlan, like: Tensor) -> Tensor | None:
        """What both ends hold already, on the device of a tensor; from a checkpoint it comes to the host."""
        return None if plan.shared is None else plan.shared.to(like.device)

    def _remember(self, plan: MessagePlan, coded: Tensor, key: Key) -> None:
        """Keep from the payload what later messages need, and drop what only this one needed."""
        microbatch = plan.remembered
        if microbatch is None:
            return
        position = microbatch.positions.start
        if self._reused is not None:
            self._reused.pop(position, None)
        if microbatch.kind != "train":
            return
        if self._index_memory is not None:
            shape = (plan.rows.num_coded, *plan.row)
            indices = self.codec.indices(coded, shape, self._coded_dtype, key) if plan.rows.num_coded else None
            self._index_memory[position] = SentIndices(plan.rows, indices)


class Encoded(NamedTuple):
    """What `Encoder.encode` hands to `Encoder.settle`."""

    x: Tensor
    payload: Tensor
    key: Key
    plan: MessagePlan
    message: Tensor | None = None
    """What feedback gave the codec; None without feedback, or if the loan has the next buffers already."""
    loan: Loan | None = None
    """The buffers of the coded rows."""


class Encoder(Coder):
    """The sending end: `encode` makes the payload, `settle` updates the state once it is sent."""

    sends = True

    def encode(self, x: Tensor, out: Tensor, key: Key, plan: MessagePlan) -> Encoded:
        """Write the payload of `x` into `out`, uint8 [plan.nbytes]; then call `settle`, before the next plan."""
        rows, coded = plan.rows, plan.coded(out)
        if rows.num_full:
            first = out[: plan.full_bytes]
            plan.opening.encode(rows.in_full(x), first, key)
            if rows.num_coded:
                first[plan.opening.used(first) :].zero_()  # sent too, as the codec's part begins behind it
        if not rows.num_coded:
            return Encoded(x, out, key, plan)
        if plan.store is None:
            given = rows.coded(x).to(self._coded_dtype)
            self._codec_for(plan).encode(given, coded, key, self._shared(plan, x))
            return Encoded(x, out, key, plan)
        assert self._feedback is not None, "only feedback has a store"
        loan = self._borrow(plan, x.device)
        given = rows.coded(x).reshape((rows.num_coded, *plan.row))
        message = self._feedback.encode(given, loan, coded, key)
        return Encoded(x, out, key, plan, message, loan)

    def settle(self, encoded: Encoded) -> None:
        """Update the state. The payload is only read: the transport may be sending it."""
        plan, message, loan = encoded.plan, encoded.message, encoded.loan
        if plan.recurs:
            return
        coded = plan.coded(encoded.payload)
        if plan.store is not None and plan.writes and plan.rows.num_full:
            rows = plan.rows.in_full(encoded.x) if plan.is_exact else self._opened(plan, encoded.payload, encoded.key)
            self._fill(plan, rows)
        if loan is not None and plan.writes:
            assert plan.store and self._feedback and message is not None, "a loan is a store's, lent to feedback"
            decoded = self._room(self._feedback, message, loan)
            self.codec.decode(coded, decoded, encoded.key)
            for u, c, buffer in zip(loan.split(message), loan.split(decoded), loan.parts, strict=True):
                self._feedback.advance(u, c, buffer)
            plan.store.keep(loan)
        self._learn(plan)
        self._remember(plan, coded, encoded.key)

    @staticmethod
    def _room(feedback: Feedback, message: Tensor, loan: Loan) -> Tensor:
        """Memory for c: that of u or of the buffer, if `advance` does not read it; new memory is as slow as a copy."""
        if feedback.receiver_keeps:
            return message
        buffer = loan.parts[0]
        fits = feedback.forgets and len(loan.parts) == 1 and buffer.device == message.device
        return buffer if fits else torch.empty_like(message)


class Decoder(Coder):
    """The receiving end."""

    sends = False

    def decode(self, payload: Tensor, out: Tensor, key: Key, plan: MessagePlan, *, finite: bool = False) -> None:
        """Write the decoded tensor into `out`, which is contiguous, and update the state.

        Raises CodecError if there is NaN or infinity where only `finite` numbers may be, as in every buffer.
        """
        rows, coded = plan.rows, plan.coded(payload)
        fills = plan.store is not None and plan.writes
        if rows.num_full:
            self._put_full(payload, out, key, plan)
            _require(not (finite or fills) or _seems_finite(rows.in_full(out)))
            if fills:
                self._fill(plan, rows.in_full(out))
        if rows.num_coded:
            in_place = not rows.num_full and out.dtype == self._coded_dtype
            shape = (rows.num_coded, *plan.row)
            values = out if in_place else torch.empty(shape, dtype=self._coded_dtype, device=out.device)
            self._codec_for(plan).decode(coded, values, key, self._shared(plan, out))
            if plan.store is None:
                _require(not finite or _seems_finite(values))
            else:
                self._receive(values.view(shape), plan, finite)
            if not in_place:
                _put(values, out, None if not rows.num_full else rows.coded_at)
                _require(not finite or out.dtype == values.dtype or _seems_finite(out))  # rounding may overflow
        self._learn(plan)
        self._remember(plan, coded, key)

    def _put_full(self, payload: Tensor, out: Tensor, key: Key, plan: MessagePlan) -> None:
        if not plan.rows.num_coded and out.dtype == self._dtype:
            plan.opening.decode(payload[: plan.full_bytes], out.detach(), key)
            return
        _put(self._opened(plan, payload, key), out, None if not plan.rows.num_coded else plan.rows.full_at)

    def _receive(self, values: Tensor, plan: MessagePlan, finite: bool) -> None:
        """Turn decoded rows into what the receiver uses, in place, and keep it in the buffers."""
        assert plan.store is not None and self._feedback is not None, "only feedback has a store"
        loan = self._borrow(plan, values.device)
        for part, buffer in zip(loan.split(values), loan.parts, strict=True):
            self._feedback.receive(part, buffer)
        _require(not (finite or plan.writes) or _seems_finite(values))
        if plan.writes:
            for part, buffer in zip(loan.split(values), loan.parts, strict=True):
                buffer.copy_(part)
            plan.store.keep(loan)


def _require(finite: bool) -> None:
    if not finite:
        raise CodecError(NOT_FINITE)


def _seems_finite(x: Tensor) -> bool:
    """Whether a tensor is finite. Nobody may wait for a GPU: there the caller asks, once its pass is over."""
    return not x.is_cpu or is_finite(x)


def _put(values: Tensor, out: Tensor, at: Tensor | None) -> None:
    """Write rows into the rows `at` of `out`, or into all if that is None."""
    if at is None:
        saturating_copy(values.view(out.shape), out)
        return
    written = torch.empty(values.shape, dtype=out.dtype, device=out.device)
    saturating_copy(values, written)
    out.index_copy_(0, put(at, out.device), written)
