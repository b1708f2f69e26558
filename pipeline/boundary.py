"""The boundary: everything that happens between two neighbouring stages, the same wherever the two live.

    stage i   ── activations ─►  boundary i  ── activations ─►  stage i+1
              ◄── gradients ───              ◄── gradients ───

Each stage holds one end of it: a Sender for what leaves and a Receiver for what arrives. A Channel describes one
direction; its plan, known to both ends before the step, says which codec each tensor goes through and how long the
frame is. Only the transport knows whether the other end is on another machine or in this process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.compress import Codec, Key, parse
from thinwire.pipeline.errors import NonFiniteError, PipelineError, WireError
from thinwire.pipeline.frames import ALIGNMENT, HEADER_BYTES, PHASES, ChannelName, Header, Phase, check, checksum
from thinwire.pipeline.meters import Meter
from thinwire.pipeline.options import WireOptions
from thinwire.pipeline.transport import ReceivingEnd, SendingEnd

UNCOMPRESSED = parse("none")


@dataclass(frozen=True)
class Plan:
    """How a frame is laid out: each tensor's codec and the byte range of its payload, and the frame's length."""

    codecs: tuple[Codec, ...]
    ranges: tuple[tuple[int, int], ...]
    nbytes: int


@dataclass(frozen=True)
class Channel:
    """One direction over one boundary.

    `examples` (meta tensors) give shape and dtype of every tensor that crosses; those that need gradients go through
    `codec`, the others as they are.
    """

    boundary: int
    name: ChannelName
    examples: tuple[Tensor, ...]
    codec: Codec
    seed: int
    plans: Mapping[Phase, Plan] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        compressed = tuple(self.codec if example.requires_grad else UNCOMPRESSED for example in self.examples)
        plain = (UNCOMPRESSED,) * len(self.examples)
        codecs = {"train": compressed, "eval-on": compressed, "eval-off": plain}
        object.__setattr__(self, "plans", {phase: lay_out(self.examples, codecs[phase]) for phase in PHASES})

    @property
    def capacity(self) -> int:
        """Bytes of the largest frame this channel can carry."""
        return max(plan.nbytes for plan in self.plans.values())

    @property
    def source(self) -> int:
        """The stage that sends."""
        return self.boundary if self.name == "activations" else self.boundary + 1

    @property
    def destination(self) -> int:
        """The stage that receives."""
        return self.boundary + 1 if self.name == "activations" else self.boundary

    @property
    def uncompressed(self) -> int:
        """Bytes of the tensors as they are."""
        return sum(example.numel() * example.element_size() for example in self.examples)

    def header(self, phase: Phase, step: int, microbatch: int) -> Header:
        """The planned header of one micro-batch's frame."""
        return Header(
            phase=phase,
            channel=self.name,
            boundary=self.boundary,
            microbatch=microbatch,
            step=step,
            length=self.plans[phase].nbytes - HEADER_BYTES,
        )

    def key(self, phase: Phase, step: int, microbatch: int, tensor: int) -> Key:
        """The source of randomness of one tensor of one micro-batch."""
        return Key(self.seed, self.boundary, self.name, phase, step, microbatch, tensor)

    def configuration(self) -> dict[str, Any]:
        """What both ends must agree on, as JSON values."""
        return {
            f"{self.name} codec": str(self.codec),
            f"{self.name} tensors": [
                f"{str(example.dtype).removeprefix('torch.')}{list(example.shape)}"
                + (" with gradient" if example.requires_grad else "")
                for example in self.examples
            ],
            "seed": self.seed,
        }

    def describe(self, step: int, microbatch: int, phase: Phase) -> str:
        """This channel's frame in words, for errors."""
        return f"{self.name} of micro-batch {microbatch}, {phase} step {step}, over boundary {self.boundary}"


def lay_out(examples: Sequence[Tensor], codecs: Sequence[Codec]) -> Plan:
    """Place the payloads one after the other behind the header, each at a multiple of 16 bytes."""
    ranges, end = [], HEADER_BYTES
    for example, codec in zip(examples, codecs, strict=True):
        start = math.ceil(end / ALIGNMENT) * ALIGNMENT
        end = start + codec.nbytes(example.shape, example.dtype)
        ranges.append((start, end))
    return Plan(tuple(codecs), tuple(ranges), end)


class Sender:
    """The end of a channel that a stage's tensors leave through."""

    def __init__(self, channel: Channel, transport: SendingEnd, options: WireOptions, meter: Meter) -> None:
        self.channel, self._transport, self._options, self._meter = channel, transport, options, meter

    def send(self, phase: Phase, step: int, microbatch: int, tensors: Sequence[Tensor | None]) -> None:
        """Encode one micro-batch's tuple into a frame and start sending it.

        Raises PipelineError if the tensors are not the ones announced, NonFiniteError on NaN or infinity.
        """
        channel, plan = self.channel, self.channel.plans[phase]
        what = channel.describe(step, microbatch, phase)
        with self._meter.section("encode"), torch.no_grad():
            self._check(tensors, what)
            frame = self._transport.take()
            for index, (tensor, codec, (start, end)) in enumerate(zip(tensors, plan.codecs, plan.ranges, strict=True)):
                if tensor is not None:
                    codec.encode(tensor.detach(), frame[start:end], channel.key(phase, step, microbatch, index))
            nones = sum(1 << index for index, tensor in enumerate(tensors) if tensor is None)
            crc32 = checksum(frame[: plan.nbytes]) if self._options.checksum else 0
            header = channel.header(phase, step, microbatch)
            Header(**{**vars(header), "nones": nones, "crc32": crc32}).write(frame)
            self._transport.send(
                frame, plan.nbytes, f"stage {channel.source} was sending {what} to stage {channel.destination}"
            )
        self._meter.sent(channel.boundary, channel.name, phase, plan.nbytes, channel.uncompressed)

    def flush(self) -> None:
        """Wait until everything sent has left."""
        with self._meter.section(
            "wait", f"stage {self.channel.source} was waiting for its {self.channel.name} to leave"
        ):
            self._transport.flush()

    def _check(self, tensors: Sequence[Tensor | None], what: str) -> None:
        examples = self.channel.examples
        got = [(tensor.dtype, tuple(tensor.shape)) if tensor is not None else None for tensor in tensors]
        planned = [(example.dtype, tuple(example.shape)) for example in examples]
        if len(got) != len(planned) or any(g is not None and g != p for g, p in zip(got, planned, strict=True)):
            raise PipelineError(
                f"stage {self.channel.source} announced {planned} but has {got} as {what}; give output_args and "
                f"input_args that match what the modules return"
            )
        if self._options.nonfinite == "raise" and not all(_finite(tensor) for tensor in tensors if tensor is not None):
            raise NonFiniteError(
                f"stage {self.channel.source} has NaN or infinity in the {what}; lower the learning rate, or set "
                f"wire.nonfinite to send to pass it on"
            )


class Receiver:
    """The end of a channel that a stage's tensors arrive through."""

    def __init__(self, channel: Channel, transport: ReceivingEnd, meter: Meter) -> None:
        self.channel, self._transport, self._meter = channel, transport, meter

    def post(self, count: int) -> None:
        """Expect `count` more micro-batches; their frames may arrive from now on."""
        channel = self.channel
        what = f"stage {channel.destination} was making room for {channel.name} from stage {channel.source}"
        self._transport.post(count, what)

    def receive(self, phase: Phase, step: int, microbatch: int) -> tuple[Tensor | None, ...]:
        """Wait for one micro-batch's frame and decode it into fresh tensors.

        Raises PeerError if none comes, WireError if it is not the planned one.
        """
        channel, plan = self.channel, self.channel.plans[phase]
        what = channel.describe(step, microbatch, phase)
        waiting = f"stage {channel.destination} was waiting for {what} from stage {channel.source}"
        with self._meter.section("wait", waiting):
            frame = self._transport.receive(waiting)
        with self._meter.section("decode"), torch.no_grad():
            try:
                header = check(channel.header(phase, step, microbatch), frame)
            except WireError as error:
                raise WireError(
                    f"stage {channel.destination} received from stage {channel.source}, as {what}: {error}"
                ) from error
            tensors: list[Tensor | None] = []
            for index, (example, codec, (start, end)) in enumerate(
                zip(channel.examples, plan.codecs, plan.ranges, strict=True)
            ):
                if header.nones >> index & 1:
                    tensors.append(None)
                    continue
                tensor = torch.empty(example.shape, dtype=example.dtype)
                codec.decode(frame[start:end], tensor, channel.key(phase, step, microbatch, index))
                tensors.append(tensor)
            self._transport.give(frame)
        return tuple(tensors)


def _finite(tensor: Tensor) -> bool:
    """Whether every value is finite; the sum tells in one pass, unless it overflows."""
    if not tensor.is_floating_point():
        return True
    return math.isfinite(tensor.sum(dtype=torch.float32).item()) or bool(tensor.isfinite().all())


@dataclass(frozen=True)
class BoundaryEnd:
    """One stage's end of a boundary: what leaves, and what arrives."""

    outgoing: Sender
    incoming: Receiver

    def begin(self, phase: Phase, num_microbatches: int) -> None:
        """Open a step: what the last one sent must have left; what this one will receive may arrive.

        Gradients flow in training only.
        """
        self.outgoing.flush()
        if phase == "train" or self.incoming.channel.name == "activations":
            self.incoming.post(num_microbatches)

    def configuration(self) -> dict[str, Any]:
        """What both ends must agree on, as JSON values."""
        return self.outgoing.channel.configuration() | self.incoming.channel.configuration()
