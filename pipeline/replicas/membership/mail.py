"""The frames of one exchange: those that this process sends, and those of the replicas that take part.

The ends of lanes put frames in and take them out. Between the two, all frames of a process go to the server as
one message, and those of the others come back as one. Frames of this replica to itself take the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
from torch import Tensor

from thinwire.compress import Progress
from thinwire.pipeline.errors import WireError
from thinwire.pipeline.processes.transport import ReceivingEnd, Seal, SendingEnd, complete
from thinwire.pipeline.replicas.division import Bucket
from thinwire.pipeline.replicas.lane import Lane, LaneEnds
from thinwire.pipeline.replicas.member import Lanes, Listener
from thinwire.pipeline.replicas.replica_passes import weights_of


class Mail:
    """The frames of an exchange, by tag; a tag names a lane."""

    def __init__(self, replica: int) -> None:
        self._replica = replica
        self._sent: dict[int, bytes] = {}
        self._arrived: dict[int, dict[int, bytes]] = {}
        self.weights: Mapping[int, int] = {}
        """Of each replica that takes part, in their order: what its contribution counts."""

    def put(self, tag: int, frame: bytes) -> None:
        """Keep a frame that is to be sent."""
        self._sent[tag] = frame

    def collect(self) -> list[bytes]:
        """All frames that are to be sent, in the order of their tags."""
        return [self._sent[tag] for tag in sorted(self._sent)]

    def deliver(self, samples: Mapping[int, int], frames: Mapping[int, Sequence[bytes]]) -> None:
        """Take what the replicas that take part sent: by replica its samples, and by other replica its frames.

        WireError if it is not a frame for each of this replica's, from each of them.
        """
        tags = sorted(self._sent)
        if samples.keys() != {*frames, self._replica} or any(len(found) != len(tags) for found in frames.values()):
            told = ", ".join(f"{len(found)} of replica {other}" for other, found in frames.items())
            raise WireError(
                f"an exchange of replicas {', '.join(map(str, samples))} must bring {len(tags)} frames of each other "
                f"one, got {told or 'none'}"
            )
        self._arrived = {other: dict(zip(tags, found, strict=True)) for other, found in frames.items()}
        self._arrived[self._replica] = self._sent
        self._sent, self.weights = {}, weights_of(samples)

    def discard(self) -> None:
        """Drop all frames: the exchange went on without this replica."""
        self._sent = {}

    def take(self, replica: int, tag: int) -> bytes:
        """A frame that a replica sent; it is not kept, because those of all replicas would take memory for H steps."""
        return self._arrived[replica].pop(tag)


class MailEnds(LaneEnds):
    """Makes the ends of lanes whose frames go through the server."""

    def __init__(self, mail: Mail, replica: int, num_stages: int) -> None:
        super().__init__([replica], None, num_stages, timedelta())
        self._mail = mail

    def sending(self, lane: Lane, to: Sequence[int], capacity: int) -> SendingEnd:
        """The end of a lane at its sender."""
        return _Outbox(capacity, self._mail, self._tag(lane))

    def receiving(self, lane: Lane, to: int, capacity: int) -> ReceivingEnd:
        """The end of a lane at a receiver."""
        return _Inbox(capacity, self._mail, lane.replica, self._tag(lane))


class MailListener(Listener):
    """A replica that adds up for itself what those who take part sent, as `mail` knows them."""

    def __init__(self, lanes: Lanes, bucket: Bucket, mail: Mail) -> None:
        super().__init__(lanes, bucket, lambda: mail.weights)

    def send_parts(self, rows: Tensor, progress: Progress) -> None:
        """Put all rows of the bucket in the mail."""
        super().send_parts(rows, progress)
        self._to_all.flush()  # the mail goes as soon as all buckets are in it


class _Outbox:
    """The sending end of a lane. It keeps no buffer: those of all lanes would take memory until the next exchange."""

    def __init__(self, capacity: int, mail: Mail, tag: int) -> None:
        self._capacity, self._mail, self._tag = capacity, mail, tag

    def take(self) -> Tensor:
        """A buffer to write the next frame into."""
        return torch.empty(self._capacity, dtype=torch.uint8)

    def send(self, buffer: Tensor, nbytes: int, what: str, seal: Seal = complete) -> None:
        """Keep a copy of the first `nbytes` of `buffer`."""
        seal(buffer)
        self._mail.put(self._tag, buffer[:nbytes].numpy().tobytes())

    def flush(self) -> None:
        """Nothing to wait for."""


class _Inbox:
    """The receiving end of a lane. It keeps no buffer either."""

    def __init__(self, capacity: int, mail: Mail, replica: int, tag: int) -> None:
        self._capacity, self._mail, self._replica, self._tag = capacity, mail, replica, tag

    def post(self, count: int, what: str) -> None:
        """Nothing to post."""

    def receive(self, what: str) -> Tensor:
        """A buffer with the frame. WireError if it is longer than any frame of this lane."""
        frame = self._mail.take(self._replica, self._tag)
        if not 0 < len(frame) <= self._capacity:
            raise WireError(f"{what}: a frame must have 1 to {self._capacity} bytes, got {len(frame)}")
        buffer = torch.empty(self._capacity, dtype=torch.uint8)
        buffer[: len(frame)] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        return buffer

    def give(self, buffer: Tensor) -> None:
        """A buffer that `receive` handed out."""
