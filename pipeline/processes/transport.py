"""The way of a frame from one end of a channel to the other: over a process group, or through memory.

A sending end lends empty buffers and takes them back filled. A receiving end gives filled buffers and takes them back
after use. Every buffer has room for the largest frame of its channel, because gloo accepts a message that is shorter
than the posted buffer, and aborts the process on a longer one. Pages that are never written cost no memory.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from contextlib import ContextDecorator
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import ThinwireError
from thinwire.pipeline.errors import PeerError


class Pool:
    """Lends buffers of `capacity` bytes on a device, pinned for copies to and from a GPU; a new one if none is free."""

    def __init__(self, capacity: int, *, pinned: bool = False, device: torch.device | None = None) -> None:
        self.capacity, self._pinned, self._device = capacity, pinned, device
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        """A uint8 buffer of `capacity` bytes, contents undefined."""
        if self._free:
            return self._free.pop()
        return torch.empty(self.capacity, dtype=torch.uint8, pin_memory=self._pinned, device=self._device)

    def give(self, buffer: Tensor) -> None:
        """A buffer that `take` lent."""
        self._free.append(buffer)


Seal = Callable[[Tensor, int], int]
"""Writes the header into a frame on the host, given the most bytes that the frame may have; returns how many it has."""


def complete(buffer: Tensor, nbytes: int) -> int:
    """Of a buffer to which nothing is to be added."""
    return nbytes


class SendingEnd(Protocol):
    """The sending end of a channel."""

    def take(self) -> Tensor:
        """A buffer to write the next frame into, where the stage computes; contents undefined."""

    def send(self, buffer: Tensor, nbytes: int, what: str, seal: Seal = complete) -> None:
        """Seal `buffer`, send as many bytes as the seal returns, of `nbytes` at most, and return at once.

        The buffer belongs to the transport again.

        Later compute may read it, but must not write it.
        """

    def flush(self) -> None:
        """Wait until everything sent has left; PeerError when the peer is gone or silent."""


class ReceivingEnd(Protocol):
    """The receiving end of a channel; frames arrive in the order they were sent."""

    def post(self, count: int, what: str) -> None:
        """Make room for `count` more frames, which may arrive from now on. A PeerError names `what`."""

    def receive(self, what: str) -> Tensor:
        """Wait for the next frame and return its buffer; `what` is named in the PeerError if none comes."""

    def bring(self, frame: Tensor, nbytes: int) -> Tensor:
        """A received frame where the stage computes: itself, or a copy of its first `nbytes` on another device."""
        return frame

    def give(self, buffer: Tensor) -> None:
        """A frame that `bring` handed out, once the last compute that reads it was asked for."""


class MemoryEnd(Pool, ReceivingEnd):
    """Both ends of a channel between two stages of one process: a queue of buffers, and no copy."""

    def __init__(self, capacity: int, *, pinned: bool = False) -> None:
        super().__init__(capacity, pinned=pinned)
        self._frames: deque[Tensor] = deque()

    def send(self, buffer: Tensor, nbytes: int, what: str, seal: Seal = complete) -> None:
        """Queue the buffer."""
        seal(buffer, nbytes)
        self._frames.append(buffer)

    def flush(self) -> None:
        """Nothing to wait for."""

    def post(self, count: int, what: str) -> None:
        """Nothing to post: the queue has room."""

    def receive(self, what: str) -> Tensor:
        """The oldest queued buffer."""
        assert self._frames, f"the schedule asks for {what} before it was sent"
        return self._frames.popleft()


class _ProcessGroupEnd(Pool):
    """An end of a channel over a process group: its buffers, and the frames under way."""

    def __init__(
        self,
        capacity: int,
        *,
        peer: int,
        group: dist.ProcessGroup,
        tag: int,
        timeout: timedelta,
        pinned: bool = False,
    ) -> None:
        super().__init__(capacity, pinned=pinned)
        self._pending: deque[tuple[dist.Work, Tensor, str]] = deque()
        self._peer, self._group, self._tag, self._timeout = peer, group, tag, timeout


class ProcessGroupSender(_ProcessGroupEnd):
    """The sending end of a channel over a process group: one wait per step."""

    def send(self, buffer: Tensor, nbytes: int, what: str, seal: Seal = complete) -> None:
        """Start sending the first `nbytes` of `buffer`."""
        nbytes = seal(buffer, nbytes)
        with reaching(what), _unrecorded:
            work = self._group.send([buffer[:nbytes]], self._peer, self._tag)
        self._pending.append((work, buffer, what))

    def flush(self) -> None:
        """Wait for every send under way."""
        while self._pending:
            work, buffer, what = self._pending[0]
            with reaching(what):
                work.wait(self._timeout)
            self._pending.popleft()
            self.give(buffer)


class ProcessGroupReceiver(_ProcessGroupEnd, ReceivingEnd):
    """The receiving end of a channel over a process group: receives posted ahead, matched in order."""

    def post(self, count: int, what: str) -> None:
        """Post `count` receives; gloo moves bytes only once the receiver has posted."""
        for _ in range(count):
            buffer = self.take()
            with reaching(what), _unrecorded:
                work = self._group.recv([buffer], self._peer, self._tag)
            self._pending.append((work, buffer, what))

    def receive(self, what: str) -> Tensor:
        """Wait for the oldest posted receive."""
        assert self._pending, f"no receive was posted for {what}"
        work, buffer, _ = self._pending.popleft()
        with reaching(what):
            work.wait(self._timeout)
        return buffer


GroupEnd = TypeVar("GroupEnd", ProcessGroupSender, ProcessGroupReceiver)


class _Unrecorded:
    """Keeps a message out of profiles: gloo writes into a profile that ended before the message was waited for."""

    def __enter__(self) -> None:
        torch.autograd._enable_record_function(False)

    def __exit__(self, *exception: object) -> None:
        torch.autograd._enable_record_function(True)


_unrecorded = _Unrecorded()


class reaching(ContextDecorator):
    """Turns failures of process-group calls inside into a PeerError that says what was awaited; errors of ours pass.

    C++ raises ValueError or MemoryError where a length was damaged on the way.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (RuntimeError, ValueError, MemoryError)) and not isinstance(error, ThinwireError):
            raise PeerError(f"{self._what}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Gloo's message without its source line and its general advice."""
    first_line = (str(error) or repr(error)).splitlines()[0]
    return re.sub(r"\[[^\]]*\.(cc|h):\d+\] ", "", first_line).split(". This is typically")[0]
