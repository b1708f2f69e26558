"""What the stages of one process share to reach their neighbours: options, a process group of its own, local links.

The group is separate from the one torch's schedules use, because their exchange at start and at each switch between
training and evaluation uses tag 0 there. The two ends of a boundary compare everything they must agree on through the
rendezvous store before the first frame.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.compress import Coder, Feedback, Method, SlotCounts
from thinwire.compress.coder import Purpose
from thinwire.compress.contraction import contraction
from thinwire.compress.stores.disk import DiskStore
from thinwire.compress.stores.memory import MemoryStore
from thinwire.compress.stores.store import Store, StoreError, StoreLayout
from thinwire.pipeline.boundary import BoundaryEnd, Channel, ChannelEnd, Receiver, Sender
from thinwire.pipeline.errors import MismatchError
from thinwire.pipeline.frames import CHANNELS, VERSION, ChannelName
from thinwire.pipeline.meters import Meter
from thinwire.pipeline.options import CompressionOptions, WireOptions
from thinwire.pipeline.transport import (
    MemoryEnd,
    ProcessGroupReceiver,
    ProcessGroupSender,
    ReceivingEnd,
    SendingEnd,
    reaching,
)

ADVISORY = ("torch",)


@dataclass(frozen=True)
class BoundaryShape:
    """Which boundary, and the tuple of meta tensors that crosses it forward."""

    index: int
    examples: tuple[Tensor, ...]

    @property
    def gradients(self) -> tuple[Tensor, ...]:
        """The tuple that crosses back: a gradient for each tensor that needs one."""
        return tuple(example for example in self.examples if example.requires_grad)


class Wire:
    """Connects the stages of this process to their neighbours, here or elsewhere.

    Args:
        compression: the codecs, or None for the defaults.
        options: time-out, checksum, what to do with NaN.
        seed: seed of every random number a codec draws.
        agreement: further JSON values both ends of every boundary must share, by name.
        group: the process group of the pipeline; None is the default group. Creating a Wire is collective over it.
        slots: how many slots feedback may fill; None means the positions of one pass, and no sample ids.
        store_folder: where stores on disk keep their files.

    Attributes:
        compressed_evaluation: whether evaluation sends what training would, or everything as it is.
        warming_up: whether training sends everything as it is.
        stores: the layout of every store that these stages may fill, and its file where it is on disk.
    """

    def __init__(
        self,
        compression: CompressionOptions | None = None,
        options: WireOptions | None = None,
        *,
        seed: int = 0,
        agreement: Mapping[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
        slots: SlotCounts | None = None,
        store_folder: Path | None = None,
    ) -> None:
        self.compression = compression or CompressionOptions()
        self.options = options or WireOptions()
        self.seed = seed
        self.slots = slots
        self.compressed_evaluation = True
        self.warming_up = False
        self.stores: list[tuple[StoreLayout, Path | None]] = []
        self._store_folder = store_folder or Path(self.compression.store_folder or "stores")
        self._agreement = dict(agreement or {})
        self._timeout = timedelta(seconds=self.options.timeout)
        self._local: dict[tuple[int, ChannelName], MemoryEnd] = {}
        self._switches = 0
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        created = dist.new_group(ranks, timeout=self._timeout, backend="gloo", use_local_synchronization=True)
        assert isinstance(created, dist.ProcessGroup), "this process is no member of its own pipeline"
        self.group = created

    def switch(self, compression: CompressionOptions) -> None:
        """Use other codecs from the next step on; every process does, and has each of its stages `reconnect`.

        Nothing may be under way. What `compare` wrote before is not read again.
        """
        before, self.compression = self.compression, compression
        self._switches += 1
        self._local = {
            channel: end
            for channel, end in self._local.items()
            if before.method(*channel) == compression.method(*channel)
        }

    def end(
        self,
        shape: BoundaryShape,
        *,
        stage: int,
        peer: int | None,
        meter: Meter,
        positions: int,
        before: BoundaryEnd | None = None,
    ) -> BoundaryEnd:
        """This stage's end of a boundary.

        Args:
            shape: which boundary, and what crosses it.
            stage: the stage asking, `shape.index` or `shape.index + 1`.
            peer: rank (in the group) of the neighbour's process; None when it is this one.
            meter: charged with this end's time and bytes.
            positions: rows of one pass, the number of position slots if nothing else was said.
            before: the end until now; channels whose codec is the same stay as they are, with all they remember.
        """
        channels = self.channels(shape)
        make = partial(
            self._channel_end, stage=stage, peer=peer, meter=meter, slots=self.slots or SlotCounts(positions=positions)
        )
        existing = {} if before is None else before.by_name
        kept = {name: end for name, end in existing.items() if end.channel.method == channels[name].method}
        forth = kept.get("activations") or make(channels["activations"], companions=[None] * len(shape.examples))
        companions = [coder for coder, x in zip(forth.coders, shape.examples, strict=True) if x.requires_grad]
        back = kept.get("gradients") or make(channels["gradients"], companions=companions)
        outgoing, incoming = (forth, back) if stage == shape.index else (back, forth)
        assert isinstance(outgoing, Sender) and isinstance(incoming, Receiver)
        return BoundaryEnd(outgoing, incoming)

    def _channel_end(
        self,
        channel: Channel,
        *,
        stage: int,
        peer: int | None,
        meter: Meter,
        slots: SlotCounts,
        companions: Sequence[Coder | None],
    ) -> Sender | Receiver:
        sends = stage == channel.source
        coders = [
            self._coder(channel, index, sends=sends, slots=slots, companion=companion)
            for index, companion in enumerate(companions)
        ]
        capacity = ChannelEnd(channel, coders, meter).capacity
        if sends:
            return Sender(channel, coders, self._sending(channel, capacity, peer), self.options, meter)
        return Receiver(channel, coders, self._receiving(channel, capacity, peer), self.options, meter)

    def _coder(self, channel: Channel, index: int, *, sends: bool, slots: SlotCounts, companion: Coder | None) -> Coder:
        method = channel.methods[index]
        name = f"boundary-{channel.boundary}-{channel.name}-{index}-{'sender' if sends else 'receiver'}"

        def path(purpose: Purpose) -> Path | None:
            on_disk = isinstance(method, Feedback) and method.store == "disk"
            return self._store_folder / f"{name}-{purpose}.slots" if on_disk else None

        def make_store(layout: StoreLayout, purpose: Purpose) -> Store:
            where = path(purpose)
            if where is None:
                return MemoryStore(layout)
            try:
                where.parent.mkdir(parents=True, exist_ok=True)
                where.unlink(missing_ok=True)  # of an earlier run of the same name
            except OSError as error:
                raise StoreError(
                    f"stores cannot be kept in {where.parent}: {error.strerror}; name another folder as "
                    f"compression.store_folder"
                ) from error
            return DiskStore(layout, where)

        coder = Coder(
            method,
            channel.examples[index],
            sends=sends,
            counts=slots,
            make_store=make_store,
            warmup_fill=self.compression.warmup_fill,
            companion=companion,
        )
        if sends:
            _warn_if_not_contractive(method, channel, channel.examples[index])
        self.stores += [(layout, path(purpose)) for purpose, layout in coder.layouts.items()]
        return coder

    def discard_stores(self) -> None:
        """Delete the files of stores on disk, once they are closed."""
        for _, path in self.stores:
            if path is not None:
                path.unlink(missing_ok=True)

    def channels(self, shape: BoundaryShape) -> dict[ChannelName, Channel]:
        """Both channels of a boundary, whoever holds its ends."""
        return {
            name: Channel(
                boundary=shape.index,
                name=name,
                examples=shape.examples if name == "activations" else shape.gradients,
                method=self.compression.method(shape.index, name),
                seed=self.seed,
            )
            for name in CHANNELS
        }

    def _sending(self, channel: Channel, capacity: int, peer: int | None) -> SendingEnd:
        if peer is None:
            return self._memory(channel, capacity)
        return ProcessGroupSender(capacity, peer=peer, group=self.group, tag=_tag(channel), timeout=self._timeout)

    def _receiving(self, channel: Channel, capacity: int, peer: int | None) -> ReceivingEnd:
        if peer is None:
            return self._memory(channel, capacity)
        return ProcessGroupReceiver(capacity, peer=peer, group=self.group, tag=_tag(channel), timeout=self._timeout)

    def _memory(self, channel: Channel, capacity: int) -> MemoryEnd:
        return self._local.setdefault((channel.boundary, channel.name), MemoryEnd(capacity))

    def compare(self, ends: Sequence[tuple[int, BoundaryEnd]], stage: int) -> None:
        """Compare this stage's configuration of each remote boundary with its neighbour's.

        Raises MismatchError listing every difference at once, PeerError when a neighbour says nothing in time; warns
        where only the torch version differs.
        """
        prefix = f"thinwire/{self.group.group_name}/{self._switches}"
        store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        mine = {index: self._configuration(end) for index, end in ends}
        for index, configuration in mine.items():
            store.set(f"{index}/{stage}", json.dumps(configuration))
        for index, configuration in mine.items():
            neighbour = index + 1 if stage == index else index
            what = f"stage {stage} was waiting for the configuration of stage {neighbour} at boundary {index}"
            with reaching(what):
                store.wait([f"{index}/{neighbour}"], self._timeout)
            theirs = json.loads(store.get(f"{index}/{neighbour}"))
            _raise_on_difference(configuration, theirs, index, stage, neighbour)

    def _configuration(self, end: BoundaryEnd) -> dict[str, Any]:
        return {
            **end.configuration(),
            "frame version": VERSION,
            "checksum": self.options.checksum,
            "warmup": self.compression.warmup,
            "warmup_fill": self.compression.warmup_fill,
            "automatic": self.compression.automatic,
            "candidates": self.compression.candidates,
            "measure": self.compression.measure,
            "torch": torch.__version__,
            **self._agreement,
        }


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The fields in which two configurations differ, with both values."""
    names = [*mine, *(name for name in theirs if name not in mine)]
    return {name: (mine.get(name), theirs.get(name)) for name in names if mine.get(name) != theirs.get(name)}


def _raise_on_difference(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], boundary: int, stage: int, neighbour: int
) -> None:
    found = differences(mine, theirs)
    for name in ADVISORY:
        if name in found:
            here, there = found.pop(name)
            warnings.warn(
                f"boundary {boundary}: stage {stage} runs {name} {here}, stage {neighbour} {there}; results may "
                f"differ in the last bits",
                stacklevel=3,
            )
    if found:
        lines = [f"  {name}: {here!r} here, {there!r} there" for name, (here, there) in found.items()]
        raise MismatchError(
            f"the two ends of boundary {boundary} must be started alike; stage {stage} (here) and stage {neighbour} "
            f"(there) differ in:\n" + "\n".join(lines)
        )


def _warn_if_not_contractive(method: Method, channel: Channel, example: Tensor) -> None:
    """Differences around a codec that makes some of them larger never converge: measured on Gaussian data."""
    if not isinstance(method, Feedback) or not method.receiver_keeps:
        return
    x = torch.randn(example.shape, generator=torch.Generator().manual_seed(0))
    c = contraction(method.inner, x)
    if not c < 1:
        warnings.warn(
            f"{method} for the {channel.name} of boundary {channel.boundary} will not converge: feedback by "
            f"differences needs a codec with |x - C(x)| < |x|, and this one has c = {c:.2f} on Gaussian data; take "
            f"more bits, or a scale over fewer values",
            stacklevel=2,
        )


def _tag(channel: Channel) -> int:
    return channel.boundary * len(CHANNELS) + CHANNELS.index(channel.name)
