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
from thinwire.pipeline.frames import ChannelName
from thinwire.pipeline.measuring.meters import Meter
from thinwire.pipeline.options import WireOptions
from thinwire.pipeline.replicas.division import Bucket
from thinwire.pipeline.replicas.lane import GRADIENTS, Lane, LaneEnds
from thinwire.pipeline.replicas.layout import FLAT, Layout
from thinwire.pipeline.wire.boundary import Receiver, Sender, capacity_of, same_clock

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
    to_all: bool
    """Whether each sends its rows to all, and adds up for itself; else each part has an owner."""
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


@dataclass(frozen=True, eq=False)
class _Part:
    """Some rows of a bucket as one replica has them: all send theirs to the owner, who sends the sum to all.

    Or each sends them to all, and adds up for itself.
    """

    rows: range
    sender: Sender
    """Sends what this replica has of them."""
    arriving: Sequence[Receiver]
    """What each replica sends, where this one adds up; else empty."""
    of_sum: Sender | None
    """Sends the sum, if this replica is the owner."""
    arriving_sum: Receiver | None
    """The sum that the owner sends; None without an owner."""


class Member:
    """One replica in the exchange of one bucket. Its methods are called in their order.

    Args:
        setting: what all buckets of the stage have in common.
        replica: which one it is.
        bucket: the rows, and who owns them.
    """

    def __init__(self, setting: Setting, replica: int, bucket: Bucket) -> None:
        self._setting, self._replica, self._bucket, self._links = setting, replica, bucket, setting.links
        everyone = range(setting.replicas)
        if setting.to_all:
            self._parts = [self._part(bucket.rows, everyone, None)]
        else:
            # from the next one on, itself last: frames for others leave first, and no two go to the same owner at once
            turns = [*everyone[replica + 1 :], *everyone[: replica + 1]]
            self._parts = [self._part(bucket.parts[owner], [owner], owner) for owner in turns if bucket.parts[owner]]

    def send_parts(self, rows: Tensor, progress: Progress) -> None:
        """Send each part of `rows`, float32 [rows of the bucket, row]; they are only read, then free."""
        # receive ahead: gloo moves bytes only once the receiver has posted
        for part in self._parts:
            for receiver in part.arriving:
                receiver.post(1)
            if part.arriving_sum is not None:
                part.arriving_sum.post(1)
        for part in self._parts:
            part.sender.send(self._message(part, progress), [self._shaped(rows, part)])

    def send_sum(self, progress: Progress) -> None:
        """Send to all what this replica owns, added up in the order of the replicas; nothing if it owns none."""
        for part in self._parts:
            if part.of_sum is not None:
                message = self._message(part, progress)
                part.of_sum.send(message, [total_of(part.arriving, message)])

    def take(self, rows: Tensor, progress: Progress) -> None:
        """Write the sums of all parts into `rows`, and wait until all frames of this bucket have left."""
        # its own sum needs no wire, so it is decoded while others travel
        for part in reversed(self._parts):
            message, place = self._message(part, progress), self._shaped(rows, part)
            if part.arriving_sum is not None:
                part.arriving_sum.receive(message, [place])
            else:
                place.copy_(total_of(part.arriving, message))
        for part in self._parts:
            part.sender.flush()
            if part.of_sum is not None:
                part.of_sum.flush()

    def errors(self) -> Iterator[tuple[str, range, Store]]:
        """Each error that this replica keeps, with feedback: as what (worker/REPLICA or owner), its rows, its store."""
        for part in self._parts:
            yield f"worker/{self._replica}", part.rows, part.sender.coders[0].buffers.store("train")
            if part.of_sum is not None:
                yield "owner", part.rows, part.of_sum.coders[0].buffers.store("train")

    def _part(self, rows: range, adding: Sequence[int], owner: int | None) -> _Part:
        """Some rows that the replicas `adding` add up, of which one may be the owner."""
        (channel, of_sums), everyone = self._setting.channels, range(self._setting.replicas)
        here = self._replica in adding
        return _Part(
            rows,
            self._sender(channel, rows, adding),
            [self._receiver(channel, rows, source, adding) for source in everyone] if here else [],
            self._sender(of_sums, rows, everyone) if owner == self._replica else None,
            None if owner is None else self._receiver(of_sums, rows, owner, everyone),
        )

    def _message(self, part: _Part, progress: Progress) -> Microbatch:
        """The message of one exchange of a part."""
        samples = self._setting.layout.shape(len(part.rows))[0]
        kind: PassKind = "warmup" if self._setting.in_full(progress) else "train"
        return Microbatch(kind, range(samples), step=progress.step)

    def _shaped(self, rows: Tensor, part: _Part) -> Tensor:
        """A part of the bucket's rows, as a codec gets it."""
        first = part.rows.start - self._bucket.rows.start
        return rows[first : first + len(part.rows)].view(self._setting.layout.shape(len(part.rows)))

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
        time = self._links.times.get(source, same_clock)
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
