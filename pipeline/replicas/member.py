"""One replica in the exchange of one bucket: it sends parts to their owners, adds up its own, and takes all sums.

    worker    u = g_i + d e_i; sends C(u) to the owner of each part; e_i <- u - C(u)     every replica i
    owner     v = d E + the sum over i of what arrived, in the order of the replicas; sends C(v) to all; E <- v - C(v)
    all       use C(v), the owner too

If every replica adds up for itself, each sends C(u_i) to all, and there is no owner.

d is the decay of `ef`. Without feedback the errors e and E are zero. A frame of a replica to itself takes the same way,
through memory. So every contribution is treated alike, and all replicas use the same bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from thinwire.compress import Decoder, Encoder, Method, Microbatch, PassKind, Progress, SlotCounts
from thinwire.compress.stores.memory import MemoryStore
from thinwire.compress.stores.store import Store
from thinwire.pipeline.devices.staging import StraightReceiver
from thinwire.pipeline.frames import ChannelName
from thinwire.pipeline.measuring.meters import Meter
from thinwire.pipeline.options import WireOptions
from thinwire.pipeline.replicas.division import Bucket
from thinwire.pipeline.replicas.lane import GRADIENTS, Lane, LaneEnds
from thinwire.pipeline.replicas.layout import FLAT, Layout
from thinwire.pipeline.wire.boundary import Receiver, Sender, capacity_of

AnyCoder = TypeVar("AnyCoder", Encoder, Decoder)
InFull = Callable[[Progress], bool]
"""Whether nothing is compressed in the exchange of a step."""


def never(progress: Progress) -> bool:
    """Of an exchange that compresses from the first step on."""
    return False


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all buckets of a stage have in common."""

    stage: int
    replicas: int
    method: Method
    seed: int
    options: WireOptions
    meter: Meter
    in_full: InFull = never
    """Says in which steps nothing is compressed."""
    layout: Layout = FLAT
    """How the elements of parameters fill rows."""
    channels: tuple[ChannelName, ChannelName] = ("parts", "sums")
    """Those of what each replica sends, and of what owners send to all."""
    carries: str = GRADIENTS
    """What travels, in words."""
    names: tuple[str, ...] = ()
    """What each replica is called; empty for replicas of one stage."""
    copies: Callable[[int, int], int] = operator.ne
    """How many links a frame from one replica to another crosses."""


class Lanes:
    """Makes the ends of one replica's lanes in one bucket."""

    def __init__(self, setting: Setting, replica: int, bucket: int, links: LaneEnds) -> None:
        self.setting, self.replica, self._bucket, self._links = setting, replica, bucket, links

    @property
    def everyone(self) -> range:
        """All replicas."""
        return range(self.setting.replicas)

    def message(self, rows: int, progress: Progress) -> Microbatch:
        """The message of one exchange with so many rows."""
        samples = self.setting.layout.shape(rows)[0]
        kind: PassKind = "warmup" if self.setting.in_full(progress) else "train"
        return Microbatch(kind, range(samples), step=progress.step)

    def sender(self, name: ChannelName, rows: int, to: Sequence[int]) -> Sender:
        """The end where this replica sends so many rows."""
        lane = self._lane(name, rows, self.replica, to[0] if len(to) == 1 else None, to_all=len(to) > 1)
        encoder = _coder(Encoder, lane)
        way = self._links.sending(lane, to, capacity_of([encoder]))
        copies = partial(self._crossing, self.replica, to)
        return Sender(lane, [encoder], way, self.setting.options, self.setting.meter, copies=copies)

    def receiver(self, name: ChannelName, rows: int, source: int, to: Sequence[int]) -> Receiver:
        """The end where this replica receives what `source` sends to all of `to`."""
        lane = self._lane(name, rows, source, self.replica, to_all=len(to) > 1)
        decoder = _coder(Decoder, lane)
        way = StraightReceiver(self._links.receiving(lane, self.replica, capacity_of([decoder])))
        copies = partial(self._crossing, source, [self.replica])
        time = self._links.local_time(source)
        return Receiver(lane, [decoder], way, self.setting.options, self.setting.meter, time, copies)

    def _crossing(self, source: int, to: Sequence[int]) -> int:
        return sum(self.setting.copies(source, receiver) for receiver in to)

    def _lane(self, name: ChannelName, rows: int, source: int, to: int | None, *, to_all: bool) -> Lane:
        setting = self.setting
        return Lane(
            boundary=setting.stage,
            name=name,
            examples=(torch.empty(setting.layout.shape(rows), dtype=torch.float32, device="meta", requires_grad=True),),
            method=setting.method,
            seed=setting.seed,
            bucket=self._bucket,
            replica=source,
            to=to,
            to_all=to_all,
            replicas=setting.replicas,
            carries=setting.carries,
            names=setting.names,
        )


class BucketMember:
    """A replica that sends each part to its owner. Its methods are called in their order.

    Args:
        lanes: make the ends of this replica in this bucket.
        bucket: the rows, and who owns them.
    """

    def __init__(self, lanes: Lanes, bucket: Bucket) -> None:
        self._lanes, self._bucket, self._replica = lanes, bucket, lanes.replica
        parts, sums = lanes.setting.channels
        everyone, sizes = lanes.everyone, [len(part) for part in bucket.parts]
        # from the next one on, itself last: frames for others leave first, and no two go to the same owner at once
        turns = [*everyone[self._replica + 1 :], *everyone[: self._replica + 1]]
        owners = [owner for owner in turns if sizes[owner]]
        self._to_owners = {owner: lanes.sender(parts, sizes[owner], [owner]) for owner in owners}
        self._from_workers, self._to_all = [], None
        if self._replica in owners:
            mine = sizes[self._replica]
            self._from_workers = [lanes.receiver(parts, mine, worker, [self._replica]) for worker in everyone]
            self._to_all = lanes.sender(sums, mine, everyone)
        # its own sum needs no wire, so it is decoded while others travel
        self._from_owners = {owner: lanes.receiver(sums, sizes[owner], owner, everyone) for owner in owners[::-1]}

    def send_parts(self, rows: Tensor, progress: Progress) -> None:
        """Send each owner its part of `rows`, float32 [rows of the bucket, row]; they are only read, then free."""
        # receive ahead: gloo moves bytes only once the receiver has posted
        for receiver in (*self._from_workers, *self._from_owners.values()):
            receiver.post(1)
        for owner, sender in self._to_owners.items():
            sender.send(self._message(owner, progress), [self._shaped(rows[self._place(owner)])])

    def send_sum(self, progress: Progress) -> None:
        """Add up the parts that this replica owns, in the order of the replicas, and send the sum to all."""
        if self._to_all is None:
            return
        message = self._message(self._replica, progress)
        self._to_all.send(message, [total_of(self._from_workers, message)])

    def take(self, rows: Tensor, progress: Progress) -> None:
        """Write the sums of all parts into `rows`, and wait until all frames of this bucket have left."""
        for owner, receiver in self._from_owners.items():
            receiver.receive(self._message(owner, progress), [self._shaped(rows[self._place(owner)])])
        for sender in (*self._to_owners.values(), *([self._to_all] if self._to_all else [])):
            sender.flush()

    def errors(self, name: ChannelName) -> Iterator[tuple[range, Store]]:
        """The rows and the store of each error that this replica keeps: as a worker (parts), or as an owner (sums)."""
        senders = {"parts": self._to_owners, "sums": {self._replica: self._to_all} if self._to_all else {}}[name]
        for owner, sender in senders.items():
            yield self._bucket.parts[owner], sender.coders[0].buffers.store("train")

    def _message(self, owner: int, progress: Progress) -> Microbatch:
        return self._lanes.message(len(self._bucket.parts[owner]), progress)

    def _place(self, owner: int) -> slice:
        """Where the part of an owner lies among the rows of the bucket."""
        part, first = self._bucket.parts[owner], self._bucket.rows.start
        return slice(part.start - first, part.stop - first)

    def _shaped(self, rows: Tensor) -> Tensor:
        return rows.view(self._lanes.setting.layout.shape(len(rows)))


class Listener:
    """A replica that sends all of a bucket to every other, and adds up for itself what others sent.

    Args:
        lanes, bucket: as for BucketMember.
    """

    def __init__(self, lanes: Lanes, bucket: Bucket) -> None:
        self._lanes, self._rows = lanes, bucket.rows
        (channel, _), count, everyone = lanes.setting.channels, len(self._rows), lanes.everyone
        self._to_all = lanes.sender(channel, count, everyone)
        self._from_all = [lanes.receiver(channel, count, source, everyone) for source in everyone]

    def send_parts(self, rows: Tensor, progress: Progress) -> None:
        """Send all rows of the bucket to all."""
        for receiver in self._from_all:
            receiver.post(1)
        shaped = rows.view(self._lanes.setting.layout.shape(len(rows)))
        self._to_all.send(self._lanes.message(len(rows), progress), [shaped])

    def send_sum(self, progress: Progress) -> None:
        """Nothing: every replica adds up for itself."""

    def take(self, rows: Tensor, progress: Progress) -> None:
        """Write the sum in the order of the replicas into `rows`, and wait until all frames have left."""
        total = total_of(self._from_all, self._lanes.message(len(rows), progress))
        rows.copy_(total.view(len(rows), -1))
        self._to_all.flush()

    def errors(self, name: ChannelName) -> Iterator[tuple[range, Store]]:
        """The rows of the bucket and the store of this replica's error; there is no owner."""
        if name == "parts":
            yield self._rows, self._to_all.coders[0].buffers.store("train")


BucketSide = BucketMember | Listener
"""One replica in the exchange of one bucket."""


def total_of(receivers: Sequence[Receiver], message: Microbatch) -> Tensor:
    """The sum of what arrives, in the order of the receivers."""
    total: Tensor | None = None
    for receiver in receivers:
        [part] = receiver.receive(message)
        assert part is not None, "what replicas send is a tensor"
        total = part if total is None else total.add_(part)
    assert total is not None, "there is a replica"
    return total


def _coder(kind: type[AnyCoder], lane: Lane) -> AnyCoder:
    [example] = lane.examples
    counts = SlotCounts(positions=example.shape[0])
    return kind(lane.method, example, counts=counts, make_store=lambda layout, purpose: MemoryStore(layout))
