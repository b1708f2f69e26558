"""One replica in the exchange of one bucket: it sends parts to their owners, adds up its own, and takes all sums.

    worker    u = g_i + e_i; sends C(u) to the owner of each part; e_i <- u - C(u)     every replica i
    owner     v = E + the sum over i of what arrived, in the order of the replicas; sends C(v) to all; E <- v - C(v)
    all       use C(v), the owner too

Without feedback the errors e and E are zero. A frame of a replica to itself takes the same way, through memory. So
every contribution is treated alike, and all replicas use the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from thinwire.compress import Decoder, Encoder, Method, Microbatch, Progress, SlotCounts
from thinwire.compress.buffers import Purpose
from thinwire.compress.stores.memory import MemoryStore
from thinwire.compress.stores.store import Store, StoreLayout
from thinwire.pipeline.boundary import ChannelEnd, Receiver, Sender
from thinwire.pipeline.frames import ChannelName
from thinwire.pipeline.meters import Meter
from thinwire.pipeline.options import WireOptions
from thinwire.pipeline.replicas.division import ROW, Bucket
from thinwire.pipeline.replicas.ends import LaneEnds
from thinwire.pipeline.replicas.lane import Lane

AnyCoder = TypeVar("AnyCoder", Encoder, Decoder)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all buckets of a stage have in common."""

    stage: int
    replicas: int
    method: Method
    seed: int
    options: WireOptions
    meter: Meter


class BucketMember:
    """The ends of one replica in one bucket.

    Args:
        setting: that of the stage.
        replica: which one it is.
        bucket: the rows, and who owns them.
        links: makes the ways of the frames.
    """

    def __init__(self, setting: Setting, replica: int, bucket: Bucket, links: LaneEnds) -> None:
        self._setting, self._replica, self._bucket, self._links = setting, replica, bucket, links
        everyone = range(setting.replicas)
        owners = [owner for owner in everyone if bucket.parts[owner]]
        self._to_owners = {owner: self._sender("parts", owner, [owner]) for owner in owners}
        self._from_workers, self._to_all = [], None
        if replica in owners:
            self._from_workers = [self._receiver("parts", worker, replica) for worker in everyone]
            self._to_all = self._sender("sums", replica, everyone)
        self._from_owners = {owner: self._receiver("sums", owner, owner) for owner in owners}

    def send_parts(self, rows: Tensor, progress: Progress) -> None:
        """Send each owner its part of the gradients, float32 [rows of the stage, ROW]."""
        # receive ahead: gloo moves bytes only once the receiver has posted
        for receiver in (*self._from_workers, *self._from_owners.values()):
            receiver.post(1)
        for owner, sender in self._to_owners.items():
            part = self._bucket.parts[owner]
            sender.send(self._message(progress), [rows[None, part.start : part.stop]])

    def send_sum(self, progress: Progress) -> None:
        """Add up the parts that this replica owns, in the order of the replicas, and send the sum to all."""
        if self._to_all is None:
            return
        message = self._message(progress)
        total: Tensor | None = None
        for receiver in self._from_workers:
            [part] = receiver.receive(message)
            assert part is not None, "a gradient is a tensor"
            total = part if total is None else total.add_(part)
        self._to_all.send(message, [total])

    def take(self, rows: Tensor, progress: Progress) -> None:
        """Write the sums of all parts into `rows`, and wait until all frames of this bucket have left."""
        for owner, receiver in self._from_owners.items():
            [total] = receiver.receive(self._message(progress))
            assert total is not None, "a sum is a tensor"
            part = self._bucket.parts[owner]
            rows[part.start : part.stop] = total[0]
        for sender in (*self._to_owners.values(), *([self._to_all] if self._to_all else [])):
            sender.flush()

    def errors(self, name: ChannelName) -> Iterator[tuple[range, Store]]:
        """The rows and the store of each error that this replica keeps: as a worker (parts), or as an owner (sums)."""
        senders = {"parts": self._to_owners, "sums": {self._replica: self._to_all} if self._to_all else {}}[name]
        for owner, sender in senders.items():
            yield self._bucket.parts[owner], sender.coders[0].buffers.store("train")

    def _message(self, progress: Progress) -> Microbatch:
        return Microbatch("train", range(1), step=progress.step, progress=progress)

    def _lane(self, name: ChannelName, owner: int, source: int, to: int | None) -> Lane:
        setting = self._setting
        # one sample, so one buffer: a part has thousands of rows
        example = torch.empty(1, len(self._bucket.parts[owner]), ROW, device="meta", requires_grad=True)
        return Lane(
            boundary=setting.stage,
            name=name,
            examples=(example,),
            method=setting.method,
            seed=setting.seed,
            bucket=self._bucket.index,
            replica=source,
            to=to,
            replicas=setting.replicas,
        )

    def _sender(self, name: ChannelName, owner: int, to: Sequence[int]) -> Sender:
        setting = self._setting
        lane = self._lane(name, owner, self._replica, to[0] if len(to) == 1 else None)
        encoder = _coder(Encoder, lane)
        capacity = ChannelEnd(lane, [encoder], setting.meter).capacity
        sending = self._links.sending(lane, to, capacity)
        copies = sum(receiver != self._replica for receiver in to)
        return Sender(lane, [encoder], sending, setting.options, setting.meter, copies=copies)

    def _receiver(self, name: ChannelName, source: int, owner: int) -> Receiver:
        setting = self._setting
        lane = self._lane(name, owner, source, self._replica)
        decoder = _coder(Decoder, lane)
        capacity = ChannelEnd(lane, [decoder], setting.meter).capacity
        receiving = self._links.receiving(lane, self._replica, capacity)
        copies = int(source != self._replica)
        return Receiver(lane, [decoder], receiving, setting.options, setting.meter, _unknown, copies)


def _coder(kind: type[AnyCoder], lane: Lane) -> AnyCoder:
    return kind(lane.method, lane.examples[0], counts=SlotCounts(positions=1), make_store=_store)


def _store(layout: StoreLayout, purpose: Purpose) -> Store:
    return MemoryStore(layout)


def _unknown(theirs: float) -> None:
    """The local time of another replica's clock: the clocks of replicas are not compared."""
