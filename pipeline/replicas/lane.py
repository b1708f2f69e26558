"""A lane: what one replica of a stage sends to the owner of a part, or an owner to all replicas.

The description that both ends have alike, as a channel of a boundary has one. The fields of a frame's header say:

    channel      parts, to an owner or to all, or sums, from an owner
    boundary     the stage; of weights that several stages hold, the first of these
    microbatch   bucket * replicas + the replica that sends
    step         the optimizer step

Its frames go through memory within a process, else over the group of the stage's replicas, or of the stages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist
from torch import Tensor

from thinwire.compress import Key, Microbatch
from thinwire.pipeline.frames import EXCHANGE, SHARED, Header
from thinwire.pipeline.processes.transport import (
    GroupEnd,
    MemoryEnd,
    ProcessGroupReceiver,
    ProcessGroupSender,
    ReceivingEnd,
    Seal,
    SendingEnd,
    complete,
)
from thinwire.pipeline.wire.boundary import LocalTime
from thinwire.pipeline.wire.channel import Channel
from thinwire.pipeline.wire.passes import phase_of

GRADIENTS = "gradients of the weights"
OUTER_GRADIENTS = "outer gradients of the weights (what they moved since the last exchange)"
SHARED_GRADIENTS = "gradients of weights that several stages hold"
STATISTICS = "running statistics of batch norms"
_NAMES = (*EXCHANGE, *SHARED)


@dataclass(frozen=True)
class Lane(Channel):
    """One lane of one bucket; `boundary` is the stage."""

    bucket: int
    replica: int
    """The replica that sends."""
    to: int | None
    """The replica that receives, at its end; None are all."""
    to_all: bool
    """Whether every replica gets the frame."""
    replicas: int
    """Their number."""
    carries: str = GRADIENTS
    """What travels, in words."""
    names: tuple[str, ...] = ()
    """What each replica is called; empty for replicas of one stage."""

    def __post_init__(self) -> None:
        self.method.check_channel("gradients")

    @cached_property
    def sender(self) -> str:
        """Who sends, in words."""
        return self._called(self.replica)

    @cached_property
    def receiver(self) -> str:
        """Who receives, in words."""
        return ("the others" if self.names else "its replicas") if self.to is None else self._called(self.to)

    def _called(self, replica: int) -> str:
        return self.names[replica] if self.names else f"replica {replica} of stage {self.boundary}"

    def header(self, microbatch: Microbatch, nbytes: int, nones: int = 0, departed: int = 0) -> Header:
        """The header of one step's frame of `nbytes`."""
        return super().header(microbatch, nbytes, nones, departed)._replace(microbatch=self._number)

    def key(self, microbatch: Microbatch, tensor: int) -> Key:
        """The source of randomness of one step: every replica, part and bucket has another."""
        phase = phase_of(microbatch.kind)
        owner = -1 if self.to_all or self.to is None else self.to
        return Key(self.seed, self.boundary, f"{self.name} {owner}", phase, microbatch.step, self._number, tensor)

    def describe(self, microbatch: Microbatch) -> str:
        """A frame in words, for errors."""
        sums = "sums of the " if self.name in ("sums", SHARED[1]) else ""
        return f"{sums}{self.carries}, bucket {self.bucket}, optimizer step {microbatch.step}"

    @property
    def _number(self) -> int:
        return self.bucket * self.replicas + self.replica


@dataclass(eq=False)
class LaneEnds:
    """Makes the ends of lanes."""

    here: Collection[int]
    """The replicas in this process."""
    group: dist.ProcessGroup | None
    """One process of each replica, in their order; None if all are here."""
    num_stages: int
    """Stages of a pipeline."""
    timeout: timedelta
    """Of a wait for another replica."""
    times: Mapping[int, LocalTime] = field(default_factory=dict)
    """Converts times of another replica's clock; those of the replicas here need none."""
    places: Sequence[int] = ()
    """Of each replica's process in the group, if several replicas may be in one."""
    first_tag: int = 0
    """What other frames of the group leave free."""
    _memory: dict[tuple[int, ...], MemoryEnd] = field(default_factory=dict, init=False)

    def sending(self, lane: Lane, to: Sequence[int], capacity: int) -> SendingEnd:
        """The end of a lane at its sender; each frame goes to all of `to`."""
        return Several([self._end(ProcessGroupSender, lane, one, one, capacity) for one in to])

    def receiving(self, lane: Lane, to: int, capacity: int) -> ReceivingEnd:
        """The end of a lane at replica `to`."""
        return self._end(ProcessGroupReceiver, lane, lane.replica, to, capacity)

    def _end(self, kind: type[GroupEnd], lane: Lane, other: int, to: int, capacity: int) -> MemoryEnd | GroupEnd:
        """An end of a lane to replica `to`: in memory if the replica at its far end is here, else over the group."""
        tag, count = self._tag(lane), len(self.places)
        if other in self.here:
            return self._memory.setdefault((tag, lane.replica, to), MemoryEnd(capacity))
        assert self.group is not None, "a replica elsewhere is in the group"
        if self.places:  # two processes may have several pairs
            tag = (tag * count + lane.replica) * count + to
        peer = self.places[other] if self.places else other
        return kind(capacity, peer=peer, group=self.group, tag=self.first_tag + tag, timeout=self.timeout)

    def _tag(self, lane: Lane) -> int:
        """The same for all pairs of replicas; every stage, bucket and channel has another."""
        return (lane.bucket * self.num_stages + lane.boundary) * len(_NAMES) + _NAMES.index(lane.name)


class Several:
    """A sending end whose frames go to several receivers; it lends one buffer, and copies it for the others."""

    def __init__(self, ends: Sequence[SendingEnd]) -> None:
        self._ends = tuple(ends)

    def take(self) -> Tensor:
        """A buffer to write the next frame into."""
        return self._ends[0].take()

    def send(self, buffer: Tensor, nbytes: int, what: str, seal: Seal = complete) -> None:
        """Start sending the first `nbytes` of `buffer` to each receiver."""
        nbytes = seal(buffer, nbytes)
        first, *others = self._ends
        # copy first: once it is sent, the buffer belongs to the transport
        copies = [end.take() for end in others]
        for copy in copies:
            copy[:nbytes] = buffer[:nbytes]
        for end, frame in zip((first, *others), (buffer, *copies), strict=True):
            end.send(frame, nbytes, what)

    def flush(self) -> None:
        """Wait until everything has left."""
        for end in self._ends:
            end.flush()
