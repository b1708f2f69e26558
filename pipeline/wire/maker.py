"""What makes the ends of channels: coders with their stores, and transports, in memory, over a group or GPU to GPU."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.compress import CodecError, Coder, Decoder, Encoder, Method, Microbatch, SlotCounts
from thinwire.compress.buffers import Purpose
from thinwire.compress.measured import contraction, swamped
from thinwire.compress.stores.files import StoreFiles
from thinwire.compress.stores.memory import MemoryStore
from thinwire.compress.stores.store import Store, StoreLayout
from thinwire.errors import ThinwireWarning
from thinwire.pipeline.devices.device import CPU
from thinwire.pipeline.devices.staging import Ways
from thinwire.pipeline.errors import OptionsError, PipelineError
from thinwire.pipeline.frames import CHANNELS, ChannelName
from thinwire.pipeline.measuring.clocks import NeighbourClocks
from thinwire.pipeline.measuring.meters import Meter
from thinwire.pipeline.options import WireOptions
from thinwire.pipeline.processes.transport import (
    GroupEnd,
    MemoryEnd,
    ProcessGroupReceiver,
    ProcessGroupSender,
    SendingEnd,
)
from thinwire.pipeline.wire.boundary import Observer, Receiver, Sender, capacity_of, same_clock
from thinwire.pipeline.wire.channel import Channel
from thinwire.pipeline.wire.nccl import GpuArrivals, GpuLinks, GpuReceiver, GpuSender, PayloadSums

AnyCoder = TypeVar("AnyCoder", Encoder, Decoder)

_MOST_SWAMPED = 0.9
"""2 bits with one scale a tensor reach it in a ResNet, and stop its training; 4 bits have 0.2 to 0.8, and do not."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The stage that holds one end of a boundary."""

    stage: int
    peer: int | None
    """Rank of the neighbour's process in the group; None if the neighbour is in this process."""
    meter: Meter
    """Counts the time and the bytes of this end."""
    rows: int
    """Samples of a micro-batch: the first dimension of the stage's first input."""
    positions: int
    """Samples of a pass: the number of position slots if the Wire has no `slots`."""
    number: int = 0
    """Its number among the stages of this process with the same index, such as one to train and one to evaluate."""
    device: torch.device = CPU
    """Where the stage computes."""


class EndMaker:
    """Makes the ends of the channels of one process.

    Args:
        group: the process group of frames.
        options: time-out, checksum, what to do with NaN.
        clocks: the clocks of neighbours.
        folder: of stores on disk; empty if there are none.
        slots: the number of slots for feedback; None means the positions of one pass.
        observer: called with every tuple that is sent, before it is encoded.

    Attributes:
        gpus: the links of this process from GPU to GPU; they are set before the stages connect, if there are any.
        stores: the layout of every store that may be filled, with its file if it is on disk.
        files: makes the stores on disk. Close stores before `files.discard` deletes their files.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        options: WireOptions,
        clocks: NeighbourClocks,
        folder: str,
        slots: SlotCounts | None,
        observer: Observer | None,
    ) -> None:
        self.gpus = GpuLinks()
        self.stores: list[tuple[StoreLayout, Path | None]] = []
        self.files = StoreFiles(Path(folder) if folder else None)
        self._group, self._options, self._clocks = group, options, clocks
        self._slots, self._observer = slots, observer
        self._local: dict[tuple[int, ChannelName, int, int], MemoryEnd] = {}
        self._ways = Ways()

    def forget(self, boundary: int, number: int) -> None:
        """Drop what is in memory between the stages of this number at a boundary, whose tensors change."""
        self._local = {key: end for key, end in self._local.items() if (key[0], key[2]) != (boundary, number)}

    def known(self, method: Method, boundary: int, name: ChannelName) -> Method:
        """A channel's method; from GPU to GPU its form whose frames have a length known in advance.

        Raises OptionsError if it has none.
        """
        try:
            return method.of_known_length() if (boundary, name) in self.gpus.groups else method
        except CodecError as error:
            raise OptionsError(
                f"wire.transport nccl needs frames whose length is known in advance: {error}; add --wire.transport gloo"
            ) from None

    def make(
        self, channel: Channel, holder: Holder, activations: Sequence[Coder | None], fill: bool
    ) -> Sender | Receiver:
        """One end of a channel.

        `activations` are the coders at this end of the activations, for `reuse`; `fill` says whether
        warm-up fills buffers.
        """
        if holder.stage == channel.source:
            encoders = [
                self._coder(Encoder, channel, index, holder, activation, fill)
                for index, activation in enumerate(activations)
            ]
            for encoder, example in zip(encoders, channel.examples, strict=True):
                _warn_if_not_contractive(encoder.method, channel, example)
            capacity, options = capacity_of(encoders), self._options
            way: SendingEnd
            if (group := self._to_gpu(channel, holder)) is not None:
                way = GpuSender(capacity, holder.device, group, self._rank(holder.peer), self._sums(capacity, holder))
                options = replace(options, checksum=False)  # that of the header stays
            else:
                sending = self._transport(ProcessGroupSender, channel, capacity, holder)
                way = self._ways.departing(sending, capacity, holder.device, at_once=holder.peer is None)
            sender = Sender(channel, encoders, way, options, holder.meter)
            if self._observer is not None:
                sender.observers.append(self._observer)
            if channel.name == "gradients":
                _warn_of_first_gradients(sender)
            return sender
        decoders = [
            self._coder(Decoder, channel, index, holder, activation, fill)
            for index, activation in enumerate(activations)
        ]
        capacity = capacity_of(decoders)
        if (group := self._to_gpu(channel, holder)) is not None:
            arrivals = GpuArrivals(capacity, holder.device, group, self._rank(holder.peer))
            return GpuReceiver(channel, decoders, arrivals, self._options, holder.meter, self._sums(capacity, holder))
        receiving = self._transport(ProcessGroupReceiver, channel, capacity, holder)
        arriving = self._ways.arriving(receiving, capacity, holder.device)
        local_time = same_clock if holder.peer is None else partial(self._clocks.local, self._rank(holder.peer))
        return Receiver(channel, decoders, arriving, self._options, holder.meter, local_time)

    def _coder(
        self, kind: type[AnyCoder], channel: Channel, index: int, holder: Holder, activation: Coder | None, fill: bool
    ) -> AnyCoder:
        method = channel.methods[index]
        name = f"boundary-{channel.boundary}-{channel.name}-{index}-{'sender' if kind.sends else 'receiver'}"
        name += f"-{holder.number}" if holder.number else ""

        def make_store(layout: StoreLayout, purpose: Purpose) -> Store:
            if purpose == "codebook":  # every message reads all of it
                return self._ways.store(MemoryStore(layout, holder.device), holder.device)
            made = self.files.make(method, f"{name}-{purpose}", layout, holder.device)
            return self._ways.store(made, holder.device)

        coder = kind(
            method,
            channel.examples[index],
            counts=self._slots or SlotCounts(positions=holder.positions),
            make_store=make_store,
            warmup_fill=fill,
            activation=activation,
        )
        self.stores += [
            (layout, None if purpose == "codebook" else self.files.path(method, f"{name}-{purpose}"))
            for purpose, layout in coder.buffers.layouts.items()
        ]
        return coder

    def _to_gpu(self, channel: Channel, holder: Holder) -> dist.ProcessGroup | None:
        """The communicator of a channel; None if its frames go another way."""
        return None if holder.peer is None else self.gpus.groups.get((channel.boundary, channel.name))

    def _sums(self, capacity: int, holder: Holder) -> PayloadSums | None:
        """What takes the place of the payloads' checksum from GPU to GPU."""
        return PayloadSums(capacity, holder.device) if self._options.checksum else None

    def _transport(self, kind: type[GroupEnd], channel: Channel, capacity: int, holder: Holder) -> MemoryEnd | GroupEnd:
        """An end of a channel: in memory where both stages are in this process, else over the process group."""
        pinned = holder.device.type != "cpu"
        if holder.peer is None:
            key = (channel.boundary, channel.name, holder.number, capacity)
            return self._local.setdefault(key, MemoryEnd(capacity, pinned=pinned))
        tag = channel.boundary * len(CHANNELS) + CHANNELS.index(channel.name)
        return kind(
            capacity,
            peer=holder.peer,
            group=self._group,
            tag=tag,
            timeout=timedelta(seconds=self._options.timeout),
            pinned=pinned,
        )

    def _rank(self, peer: int | None) -> int:
        """The rank in the default group of a member of this group."""
        assert peer is not None, "the neighbour is in another process"
        return dist.get_process_group_ranks(self._group)[peer]


def require_rows(channel: Channel, holder: Holder) -> None:
    """Raise PipelineError if feedback would take something else than samples for the rows of a tensor."""
    for method, example in zip(channel.methods, channel.examples, strict=True):
        if method.feedback is not None and (not example.shape or example.shape[0] != holder.rows):
            raise PipelineError(
                f"{method} keeps a buffer for each sample, so the first dimension of what crosses boundary "
                f"{channel.boundary} must be the {holder.rows} samples of stage {holder.stage}'s input, got "
                f"{list(example.shape)}; return such tensors, or take a codec without feedback"
            )


def _warn_if_not_contractive(method: Method, channel: Channel, example: Tensor) -> None:
    """Warn if feedback by differences cannot converge, because the codec makes some differences larger.

    This is measured on Gaussian data.
    """
    if method.feedback is None or not method.feedback.receiver_keeps:
        return
    x = torch.randn(example.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    c = contraction(method.inner, x)
    if not c < 1:
        warnings.warn(
            f"{method} for the {channel.name} of boundary {channel.boundary} will not converge: feedback by "
            f"differences needs a codec with |x - C(x)| < |x|, and this one has c = {c:.2f} on Gaussian data; take "
            f"more bits, or a scale over fewer values",
            ThinwireWarning,
            stacklevel=2,
        )


def _warn_of_first_gradients(sender: Sender) -> None:
    """Warn if a codec without feedback changes nearly all of the first gradients in training beyond recognition."""

    def look(channel: Channel, microbatch: Microbatch, tensors: Sequence[Tensor | None]) -> None:
        if microbatch.kind != "train":
            return
        sender.observers = [observer for observer in sender.observers if observer is not look]
        for coder, tensor in zip(sender.coders, tensors, strict=True):
            if tensor is None or coder.method.feedback is not None or coder.method.codec.reuses_indices:
                continue
            if (share := swamped(coder.codec, tensor)) > _MOST_SWAMPED:
                warnings.warn(
                    f"{coder.method} changes {share:.0%} of the first gradients of boundary {channel.boundary} by more "
                    f"than their own size, so training may stand still; take more bits, a scale over fewer values, or "
                    f'a grid that holds zero, such as q(8, per="channel", grid="midtread")',
                    ThinwireWarning,
                    stacklevel=2,
                )

    sender.observers.append(look)
