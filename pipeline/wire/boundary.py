"""The boundary: everything between two neighbouring stages. It is the same wherever the two live.

    stage i   ── activations ─►  boundary i  ── activations ─►  stage i+1
              ◄── gradients ───              ◄── gradients ───

Each stage holds one end of it: a Sender for frames that leave and a Receiver for frames that arrive. A Channel
describes one direction. The plan of a frame says which codec each tensor goes through, and how long the frame is; both
ends make it alike before the frame is sent. Only the transport knows whether the other end is in another process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.compress import CodecError, Coder, Decoder, Encoder, Microbatch
from thinwire.compress.codec import is_finite
from thinwire.compress.coder import NOT_FINITE, Encoded
from thinwire.compress.plan import MessagePlan
from thinwire.pipeline.errors import NonFiniteError, PipelineError, WireError
from thinwire.pipeline.frames import HEADER_BYTES, ChannelName, Header, check, departure, seal
from thinwire.pipeline.measuring.meters import Meter, Route, Traffic, count
from thinwire.pipeline.options import WireOptions
from thinwire.pipeline.processes.transport import ReceivingEnd, SendingEnd
from thinwire.pipeline.wire.channel import Channel, frame_bytes, is_coded, place_of
from thinwire.pipeline.wire.passes import phase_of


@dataclass(frozen=True, eq=False)
class FramePlan:
    """The plan of one micro-batch's tuple: a plan for each tensor's message, and where the payloads lie."""

    messages: tuple[MessagePlan, ...]
    nbytes: int
    """Bytes of the frame; if payloads vary, the most."""
    traffic: Traffic
    """What it counts as, with these bytes."""


Observer = Callable[[Channel, Microbatch, Sequence[Tensor | None]], None]
"""Called with every tuple that a stage sends, before it is encoded. It must not change the tensors."""


def capacity_of(coders: Iterable[Coder]) -> int:
    """Bytes of the largest frame that an end with these coders may send or get."""
    return frame_bytes(coder.capacity for coder in coders)


class ChannelEnd:
    """One end of a channel: its description, and a coder for each tensor, which keeps the state of its method.

    So many `copies()` of each frame cross a link. While it is `bypassed`, an evaluation sends everything in full.
    """

    def __init__(self, channel: Channel, coders: Sequence[Coder], meter: Meter, copies: Callable[[], int]) -> None:
        self.channel, self.coders, self._meter, self._copies = channel, tuple(coders), meter, copies
        self._flags = FiniteFlags()
        self._recurring: dict[tuple[MessagePlan, ...], FramePlan] = {}
        self.bypassed = False

    def plan(self, microbatch: Microbatch) -> FramePlan:
        """The plan of a micro-batch. Both ends make the same one before it is sent."""
        if self.bypassed and microbatch.kind == "eval-on":
            microbatch = replace(microbatch, kind="eval-off")
        messages = tuple([coder.plan(microbatch) for coder in self.coders])
        if messages in self._recurring:
            return self._recurring[messages]
        nbytes = frame_bytes(message.nbytes for message in messages)
        plan = FramePlan(messages, nbytes, self._traffic(messages, nbytes))
        if all(message.recurs for message in messages):
            self._recurring[messages] = plan
        return plan

    def _traffic(self, messages: Sequence[MessagePlan], nbytes: int) -> Traffic:
        tensors = [
            (math.prod((*example.shape[:1], *message.row)), message, example)
            for message, example in zip(messages, self.channel.examples, strict=True)
        ]
        coded = [(elements, message) for elements, message, example in tensors if is_coded(example)]
        return Traffic(
            frames=1,
            bytes=nbytes,
            uncompressed=sum(elements * example.element_size() for elements, _, example in tensors),
            elements=sum(elements for elements, _ in coded),
            rows=sum(len(message.rows.full) for _, message in coded),
            full_rows=sum(message.rows.num_full for _, message in coded if message.is_exact),
        )

    def count(self, into: dict[Route, Traffic], microbatch: Microbatch, plan: FramePlan, nbytes: int) -> None:
        """Count one frame of `nbytes`, as often as it crosses a link."""
        traffic = plan.traffic if nbytes == plan.nbytes else replace(plan.traffic, bytes=nbytes)
        for _ in range(self._copies()):
            count(into, (self.channel.boundary, self.channel.name, phase_of(microbatch.kind)), traffic)

    def _is_finite(self, tensor: Tensor, microbatch: Microbatch) -> bool:
        """Whether a tensor is finite; of one on a GPU that is asked at the end of the pass."""
        if tensor.is_cpu:
            return is_finite(tensor)
        self._flags.add(tensor, self.channel.describe(microbatch))
        return True

    def prefetch(self, microbatch: Microbatch) -> None:
        """Announce a micro-batch, so that its buffers are read ahead."""
        for coder in self.coders:
            coder.buffers.prefetch(microbatch)

    def digests(self) -> dict[str, str]:
        """A hash of every buffer both ends of this channel keep, by name."""
        return {
            f"boundary {self.channel.boundary} {self.channel.name} tensor {index} {name}": digest
            for index, coder in enumerate(self.coders)
            for name, digest in coder.buffers.digests().items()
        }

    def state_dict(self) -> dict[str, Any]:
        """The state of the coders."""
        return {str(index): coder.state_dict() for index, coder in enumerate(self.coders)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take exactly the state that `state_dict` returned; an empty one is that before the first frame."""
        for index, coder in enumerate(self.coders):
            coder.load_state_dict(state[str(index)] if state else {})

    def close(self) -> None:
        """Wait until every buffer is on its medium, and close the stores."""
        for coder in self.coders:
            coder.buffers.flush()
            coder.buffers.close()


class Sender(ChannelEnd):
    """The sending end of a channel; its `observers` get the tensors first, `way` leads to the other end."""

    def __init__(
        self,
        channel: Channel,
        encoders: Sequence[Encoder],
        way: SendingEnd,
        options: WireOptions,
        meter: Meter,
        copies: Callable[[], int] = lambda: 1,
    ) -> None:
        super().__init__(channel, encoders, meter, copies)
        self._encoders, self._way, self._options = tuple(encoders), way, options
        self._planned = [(example.dtype, tuple(example.shape)) for example in channel.examples]
        self._finite_only = refuses_nonfinite(options, channel)
        self.observers: list[Observer] = []

    def send(self, microbatch: Microbatch, tensors: Sequence[Tensor | None]) -> None:
        """Encode one micro-batch's tuple into a frame, start to send it, and then update the buffers.

        Raises PipelineError if the tensors differ from those announced, NonFiniteError on NaN or infinity.
        """
        channel = self.channel
        with self._meter.section("encode"), _lasting(), torch.set_grad_enabled(False):
            # 1. Refuse wrong tensors first, before anything is changed. torch may only have noted that
            #    numbers are conjugate or negative.
            tensors = [None if each is None else each.detach().resolve_conj().resolve_neg() for each in tensors]
            self._check(tensors, microbatch)
            for observer in self.observers:
                observer(channel, microbatch, tensors)
            # 2. Plan before a buffer changes: the other end plans from the same slots, as the last message
            #    of these rows left them.
            plan = self.plan(microbatch)
            # 3. Encode, then seal: the checksum in the header covers the payloads, once they are on the host.
            frame = self._way.take()
            encoded, nbytes, end = self._encode(frame, microbatch, plan, tensors)
            nones = sum(1 << at for at, tensor in enumerate(tensors) if tensor is None)
            # 4. Send as soon as the frame is complete. From here on the transport reads it, so nothing may write it.
            self._way.send(
                frame, nbytes, channel.sending(microbatch), partial(self._seal, microbatch, plan, nones, end)
            )
            # 5. Settle last, while the wire is busy: nothing reads the buffers of these rows before their next plan.
            for encoder, one in encoded:
                encoder.settle(one)

    def _seal(
        self, microbatch: Microbatch, plan: FramePlan, nones: int, end: _End | None, frame: Tensor, nbytes: int
    ) -> int:
        """Write the header, with the time of departure, and return the frame's length.

        For a frame from a GPU the courier calls this, so no other thread waits for the length.
        """
        nbytes = nbytes if end is None else end(frame)
        self.count(self._meter.sent, microbatch, plan, nbytes)
        header = self.channel.header(microbatch, nbytes, nones, departed=time.perf_counter_ns())
        seal(header, frame.numpy().data, payload=self._options.checksum)
        return nbytes

    def _encode(
        self, frame: Tensor, microbatch: Microbatch, plan: FramePlan, tensors: Sequence[Tensor | None]
    ) -> tuple[list[tuple[Encoder, Encoded]], int, _End | None]:
        """Write every payload into the frame.

        Returns the messages that are still to be settled, the most bytes that the frame may have, and a function that
        reads its length on the host; None if it has the most.
        """
        messages, stop, end = [], HEADER_BYTES, None
        for index, (encoder, tensor, message) in enumerate(zip(self._encoders, tensors, plan.messages, strict=True)):
            # the next payload may overwrite what the one before does not use
            place = place_of(message.nbytes, stop if end is None else end(frame))
            stop, end = place.stop, None
            if tensor is not None:
                key = self.channel.key(microbatch, index)
                messages.append((encoder, encoder.encode(message.crossing(tensor), frame[place], key, message)))
                end = partial(_end, encoder, message, place) if encoder.varies else None
        return messages, stop, end

    def flush(self) -> None:
        """Wait until all sent frames have left; NonFiniteError if one from a GPU had NaN or infinity."""
        what = f"{self.channel.sender} was waiting for its {self.channel.name} to leave"
        with self._meter.section("wire", what):
            self._way.flush()
        if (bad := self._flags.first_bad()) is not None:
            raise self._not_finite(bad)

    def _check(self, tensors: Sequence[Tensor | None], microbatch: Microbatch) -> None:
        got = [None if tensor is None else (tensor.dtype, tensor.shape) for tensor in tensors]
        if got != self._planned and not self._may_be(got):
            has = [None if one is None else (one[0], tuple(one[1])) for one in got]
            change = "give output_args and input_args that match what the modules return"
            if [one and (one[0], one[1][1:]) for one in has] == [(dtype, size[1:]) for dtype, size in self._planned]:
                change = (
                    "drop a smaller last batch (drop_last=True), or make a new schedule for it and another one after "
                    "it; if every micro-batch has this size, give output_args and input_args of this size"
                )
            raise PipelineError(
                f"{self.channel.sender} announced {self._planned} but has {has} as {self.channel.describe(microbatch)};"
                f" {change}"
            )
        if self._finite_only:
            for tensor in tensors:
                if tensor is not None and not self._is_finite(tensor, microbatch):
                    raise self._not_finite(self.channel.describe(microbatch))

    def _may_be(self, got: Sequence[tuple[torch.dtype, Sequence[int]] | None]) -> bool:
        """Whether these are the planned tensors but for some that may be None."""
        fits = [one == planned or one is None for one, planned in zip(got, self._planned, strict=False)]
        return self.channel.may_leave_out and len(got) == len(self._planned) and all(fits)

    def _not_finite(self, what: str) -> NonFiniteError:
        return NonFiniteError(
            f"{self.channel.sender} has NaN or infinity in the {what}; lower the learning rate, or pass it on, with "
            f"wire.nonfinite send and a codec without feedback"
        )


_End = Callable[[Tensor], int]
"""Tells where the last payload of a frame ends."""


def _end(encoder: Encoder, message: MessagePlan, place: slice, frame: Tensor) -> int:
    return int(place.start) + encoder.used(frame[place], message)


def refuses_nonfinite(options: WireOptions, channel: Channel) -> bool:
    """Whether NaN or infinity stops the run at a channel.

    Gradients in float16 overflow now and then, because a scaler multiplies the loss; then it skips the step. Feedback
    would keep what overflowed, for all steps to come.
    """
    scaled = channel.name == "gradients" and any(example.dtype == torch.float16 for example in channel.examples)
    keeps = any(method.feedback is not None for method in channel.methods)
    return keeps or (options.nonfinite == "raise" and not scaled)


LocalTime = Callable[[float], float | None]
"""Converts a time of the sender's clock to this process's clock, in seconds; None if unknown."""


def same_clock(theirs: float) -> float:
    """The local time of a sender in this process."""
    return theirs


class Receiver(ChannelEnd):
    """The receiving end of a channel; `way` leads from the other end, `local_time` converts times of its clock."""

    def __init__(
        self,
        channel: Channel,
        decoders: Sequence[Decoder],
        way: ReceivingEnd,
        options: WireOptions,
        meter: Meter,
        local_time: LocalTime = same_clock,
        copies: Callable[[], int] = lambda: 1,
    ) -> None:
        super().__init__(channel, decoders, meter, copies)
        self._decoders, self._way, self._options = tuple(decoders), way, options
        self._local_time = local_time
        self._finite_only = refuses_nonfinite(options, channel)
        self._varies = any(decoder.varies for decoder in decoders)
        self._room = 0  # frames that may arrive

    def post(self, count: int) -> None:
        """Let `count` frames arrive from now on; those that there is room for already count."""
        if count > self._room:
            channel = self.channel
            waiting = f"{channel.receiver} was making room for {channel.name} from {channel.sender}"
            with _lasting():
                self._way.post(count - self._room, waiting)
            self._room = count

    def receive(self, microbatch: Microbatch, room: Sequence[Tensor] = ()) -> tuple[Tensor | None, ...]:
        """Wait for one micro-batch's frame and decode it into fresh tensors, or into `room` if there is any.

        Raises PeerError if none comes, WireError if it is not the planned frame or cannot be decoded.
        """
        channel, waiting = self.channel, self.channel.waiting(microbatch)
        # 1. Wait; the time of departure counts for measurements only, so the frame need not be checked yet.
        self.post(1)  # a pass of another schedule may have more micro-batches than the stage knows of
        with self._meter.waiting(waiting) as wait:
            frame = self._way.receive(waiting)
            self._room -= 1
            memory = frame.numpy().data
            wait.departed = self._local_time(departure(memory))
        with self._meter.section("decode"), _lasting(), torch.set_grad_enabled(False):
            # 2. Plan before a buffer changes, as the sender did.
            plan = self.plan(microbatch)
            # 3. Check before decoding: a wrong frame must not change a buffer.
            planned = channel.header(microbatch, plan.nbytes)
            try:
                header = check(planned, memory, payload=self._options.checksum, shorter=self._varies)
                places = self._places(frame, header, plan)
                self.count(self._meter.received, microbatch, plan, HEADER_BYTES + header.length)
                # 4. Decode, which updates the buffers of feedback.
                brought = self._way.bring(frame, HEADER_BYTES + header.length)
                tensors = self._decode(brought, places, microbatch, plan, room)
            except (CodecError, WireError) as error:
                raise self._refused(channel.describe(microbatch), error) from error
            # 5. Give the frame back last: the next receive may overwrite it.
            self._way.give(brought)
        return tensors

    def confirm(self) -> None:
        """Raise WireError if a GPU decoded NaN or infinity since the last call, where only finite numbers may be."""
        if (bad := self._flags.first_bad()) is not None:
            raise self._refused(bad, CodecError(NOT_FINITE))

    def _places(self, frame: Tensor, header: Header, plan: FramePlan) -> list[slice | None]:
        """Where the payloads lie in a frame, each with room for the longest; None for a tensor that is None.

        Raises WireError if they do not end where the header says, or one that must be there is None.
        """
        places: list[slice | None] = []
        stop = HEADER_BYTES
        for index, (decoder, message) in enumerate(zip(self._decoders, plan.messages, strict=True)):
            place = place_of(message.nbytes, stop)
            is_none = header.nones >> index & 1
            if is_none and not self.channel.may_leave_out:
                raise WireError(f"tensor {index} is None, and only gradients between stages may be")
            stop = place.start + decoder.used(frame[place], message) if decoder.varies and not is_none else place.stop
            places.append(None if is_none else place)
        if stop != HEADER_BYTES + header.length:
            raise WireError(f"the frame has {HEADER_BYTES + header.length} bytes, but its payloads end at {stop}")
        return places

    def _decode(
        self,
        frame: Tensor,
        places: Sequence[slice | None],
        microbatch: Microbatch,
        plan: FramePlan,
        room: Sequence[Tensor],
    ) -> tuple[Tensor | None, ...]:
        """Decode payloads into room or fresh tensors, as finite as those that a sender with these options sends."""
        tensors: list[Tensor | None] = []
        parts = zip(self.channel.examples, self._decoders, plan.messages, places, strict=True)
        for index, (example, decoder, message, place) in enumerate(parts):
            if place is None:
                tensors.append(None)
                continue
            tensor = room[index] if room else torch.empty(example.shape, dtype=example.dtype, device=frame.device)
            part = message.crossing(tensor)
            decoder.decode(frame[place], part, self.channel.key(microbatch, index), message, finite=self._finite_only)
            if part is not tensor:
                # of a single row, the part is a view of the tensor itself
                tensor[:, : part.shape[1]] = part
                tensor[:, part.shape[1] :] = 0
            fills = message.store is not None and message.writes  # NaN would stay there
            if not tensor.is_cpu and (self._finite_only or fills):
                self._flags.add(tensor, self.channel.describe(microbatch))
            tensors.append(tensor)
        return tuple(tensors)

    def _refused(self, what: str, error: Exception) -> WireError:
        channel = self.channel
        return WireError(f"{channel.receiver} received from {channel.sender}, as {what}: {error}")


@dataclass(frozen=True)
class BoundaryEnd:
    """One stage's end of a boundary: a sender and a receiver."""

    outgoing: Sender
    incoming: Receiver

    @property
    def by_name(self) -> dict[ChannelName, Sender | Receiver]:
        """Sender and receiver by the name of their channel."""
        return {end.channel.name: end for end in (self.outgoing, self.incoming)}

    def begin(self, microbatches: Sequence[Microbatch]) -> None:
        """Open a pass: wait for the sends of the last one, and post the receives of this one.

        Gradients flow in training only, and where a tensor needs one.
        """
        # sends first: their buffers go back to the pool, which would else grow with every pass
        self.outgoing.flush()
        for end in (self.outgoing, self.incoming):
            if end.channel.examples and (
                end.channel.name == "activations" or phase_of(microbatches[0].kind) == "train"
            ):
                # in the order of use: a store on disk reads ahead in this order
                for microbatch in microbatches:
                    end.prefetch(microbatch)
                if isinstance(end, Receiver):
                    end.post(len(microbatches))


def _lasting() -> AbstractContextManager[Any]:
    """A context for what outlives its pass, as buffers do: training could not write tensors of inference mode."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


class FiniteFlags:
    """A flag for each tensor of a pass, with words that say which it is."""

    def __init__(self) -> None:
        self._flags: list[tuple[str, Tensor]] = []

    def add(self, tensor: Tensor, what: str) -> None:
        """Order a flag of a tensor; nobody waits."""
        if tensor.is_floating_point() or tensor.is_complex():
            self._flags.append((what, tensor.isfinite().all()))

    def first_bad(self) -> str | None:
        """The first tensor with NaN or infinity since the last call, in words; waits for the GPU."""
        flags, self._flags = self._flags, []
        if not flags:
            return None
        finite = torch.stack([flag for _, flag in flags]).tolist()
        return next((what for (what, _), fine in zip(flags, finite, strict=True) if not fine), None)
