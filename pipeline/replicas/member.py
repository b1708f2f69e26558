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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from thinwire.compress import Decoder, Encoder, Method, Microbatch, PassKind, Progress, SlotCounts
from thinwire.compress.stores.memory import MemoryStore
from thinwire.compress.stores.store import Store
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
Everyone = Callable[[Sequence[bool]], Sequence[Sequence[bool]]]
"""Gives the answers of a stage in each process that has it; collective."""


def never(progress: Progress) -> bool:
    """Of an exchange that compresses from the first step on."""
    return False


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all buckets of a stage have in common."""

    stage: int
    replicas: int
    here: Sequence[int]
    """Those in this process."""
    member: type[Member]
    """What each is in the exchange of a bucket."""
    links: LaneEnds
    """Makes the ways of the frames."""
    everyone: Everyone
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


class Member(ABC):
    """One replica in the exchange of one bucket. Its methods are called in their order.

    Args:
        setting: what all buckets of the stage have in common.
        replica: which one it is.
        bucket: the rows, and who owns them.
    """

    def __init__(self, setting: Setting, replica: int, bucket: Bucket) -> None:
        self._setting, self._replica, self._bucket, self._links = setting, replica, bucket, setting.links
        self._everyone = range(setting.replicas)

    @abstractmethod
    def send_parts(self, rows: Tensor, progress: Progress) -> None:
        """Send `rows`, float32 [rows of the bucket, row]; they are only read, then free."""

    def send_sum(self, progress: Progress) -> None:
        """Send to all what this replica owns, added up in the order of the replicas; nothing if it owns none."""
        return

    @abstractmethod
    def take(self, rows: Tensor, progress: Progress) -> None:
        """Write the sums of all parts into `rows`, and wait until all frames of this bucket have left."""

    @abstractmethod
    def errors(self, name: ChannelName) -> Iterator[tuple[range, Store]]:
        """The rows and the store of each error that this replica keeps: as a worker (parts), or as an owner (sums)."""

    def _message(self, rows: range, progress: Progress) -> Microbatch:
        """The message of one exchange with these rows."""
        samples = self._setting.layout.shape(len(rows))[0]
        kind: PassKind = "warmup" if self._setting.in_full(progress) else "train"
        return Microbatch(kind, range(samples), step=progress.step)

    def _shaped(self, rows: Tensor) -> Tensor:
        return rows.view(self._setting.layout.shape(len(rows)))

    def _sender(self, name: ChannelName, rows: range, to: Sequence[int]) -> Sender:
        """The end where this replica sends these rows."""
        lane = self._lane(name, rows, self._replica, to[0] if len(to) == 1 else None, to_all=len(to) > 1)
        encoder = _coder(Encoder, lane)
        way = self._links.sending(lane, to, capacity_of([encoder]))
        copies = partial(self._crossing, self._replica, to)
        return Sender(lane, [encoder], way, self._setting.options, self._setting.meter, copies=copies)

    def _receiver(self, name: ChannelName, rows: range, source: int, to: Sequence[int]) -> Receiver:
        """The end where this replica receives what `source` sends to all of `to`."""
        lane = self._lane(name, rows, source, self._replica, to_all=len(to) > 1)
        decoder = _coder(Decoder, lane)
        way = self._links.receiving(lane, self._replica, capacity_of([decoder]))
        copies = partial(self._crossing, source, [self._replica])
        time = self._links.local_time(source)
        return Receiver(lane, [decoder], way, self._setting.options, self._setting.meter, time, copies)

    def _crossing(self, source: int, to: Sequence[int]) -> int:
        return sum(self._setting.copies(source, receiver) for receiver in to)

    def _lane(self, name: ChannelName, rows: range, source: int, to: int | None, *, to_all: bool) -> Lane:
        setting, shape = self._setting, self._setting.layout.shape(len(rows))
        return Lane(
            boundary=setting.stage,
            name=name,
            examples=(torch.empty(shape, dtype=torch.float32, device="meta", requires_grad=True),),
            method=setting.method,
            seed=setting.seed,
            bucket=self._bucket.index,
            replica=source,
            to=to,
            to_all=to_all,
            replicas=setting.replicas,
            carries=setting.carries,
            names=setting.names,
        )


class ByParts(Member):
    """A replica that sends each part to its owner."""

    def __init__(self, setting: Setting, replica: int, bucket: Bucket) -> None:
        super().__init__(setting, replica, bucket)
        (channel, of_sums), everyone, parts = setting.channels, self._everyone, bucket.parts
        # from the next one on, itself last: frames for others leave first, and no two go to the same owner at once
        turns = [*everyone[replica + 1 :], *everyone[: replica + 1]]
        owners = [owner for owner in turns if parts[owner]]
        self._to_owners = {owner: self._sender(channel, parts[owner], [owner]) for owner in owners}
        self._from_workers, self._to_all = [], None
        if replica in owners:
            mine = parts[replica]
            self._from_workers = [self._receiver(channel, mine, worker, [replica]) for worker in everyone]
            self._to_all = self._sender(of_sums, mine, everyone)
        # its own sum needs no wire, so it is decoded while others travel
        self._from_owners = {owner: self._receiver(of_sums, parts[owner], owner, everyone) for owner in owners[::-1]}

    def send_parts(self, rows: Tensor, progress: Progress) -> None:
        """Send each owner its part."""
        # receive ahead: gloo moves bytes only once the receiver has posted
        for receiver in (*self._from_workers, *self._from_owners.values()):
            receiver.post(1)
        for owner, sender in self._to_owners.items():
            sender.send(self._message_of(owner, progress), [self._shaped(rows[self._place(owner)])])

    def send_sum(self, progress: Progress) -> None:
        """Add up the parts that this replica owns, in the order of the replicas, and send the sum to all."""
        if self._to_all is None:
            return
        message = self._message_of(self._replica, progress)
        self._to_all.send(message, [total_of(self._from_workers, message)])

    def take(self, rows: Tensor, progress: Progress) -> None:
        """Write the sums that their owners sent."""
        for owner, receiver in self._from_owners.items():
            receiver.receive(self._message_of(owner, progress), [self._shaped(rows[self._place(owner)])])
        for sender in (*self._to_owners.values(), *([self._to_all] if self._to_all else [])):
            sender.flush()

    def errors(self, name: ChannelName) -> Iterator[tuple[range, Store]]:
        """One for each owner, and one for the part that this replica owns."""
        senders = {"parts": self._to_owners, "sums": {self._replica: self._to_all} if self._to_all else {}}[name]
        for owner, sender in senders.items():
            yield self._bucket.parts[owner], sender.coders[0].buffers.store("train")

    def _message_of(self, owner: int, progress: Progress) -> Microbatch:
        return self._message(self._bucket.parts[owner], progress)

    def _place(self, owner: int) -> slice:
        """Where the part of an owner lies among the rows of the bucket."""
        part, first = self._bucket.parts[owner], self._bucket.rows.start
        return slice(part.start - first, part.stop - first)


class ToAll(Member):
    """A replica that sends all of a bucket to every other, and adds up for itself what others sent."""

    def __init__(self, setting: Setting, replica: int, bucket: Bucket) -> None:
        super().__init__(setting, replica, bucket)
        (channel, _), everyone = setting.channels, self._everyone
        self._to_all = self._sender(channel, bucket.rows, everyone)
        self._from_all = [self._receiver(channel, bucket.rows, source, everyone) for source in everyone]

    def send_parts(self, rows: Tensor, progress: Progress) -> None:
        """Send all rows of the bucket to all."""
        for receiver in self._from_all:
            receiver.post(1)
        self._to_all.send(self._message(self._bucket.rows, progress), [self._shaped(rows)])

    def take(self, rows: Tensor, progress: Progress) -> None:
        """Write the sum in the order of the replicas."""
        total = total_of(self._from_all, self._message(self._bucket.rows, progress))
        rows.copy_(total.view(len(rows), -1))
        self._to_all.flush()

    def errors(self, name: ChannelName) -> Iterator[tuple[range, Store]]:
        """One of all rows; there is no owner."""
        if name == "parts":
            yield self._bucket.rows, self._to_all.coders[0].buffers.store("train")


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
