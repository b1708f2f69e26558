"""The way of frames between the device of a stage and its transport, which wants them in the memory of the host.

    sender     encode ► frame on the GPU ─ side stream ─► pinned frame ─ courier ─► seal, send
    receiver   receive, check ► pinned frame ─ side stream ─► frame on the GPU ► decode

The header and the checksum are the host's: they are written and compared in the pinned frame. On the CPU there is one
frame, and nothing is copied.
"""

from __future__ import annotations

from collections import deque
from functools import cache, partial

import torch
from torch import Tensor

from thinwire.compress.stores.store import Store
from thinwire.pipeline.devices.courier import Courier
from thinwire.pipeline.devices.staged_store import RowLanes, StagedStore
from thinwire.pipeline.devices.streams import CopyStream
from thinwire.pipeline.processes.transport import ReceivingEnd, Seal, SendingEnd, complete


class StagedSender:
    """A sending end on a GPU: the thread that launches compute gives orders, and the courier waits and sends.

    Args:
        transport: lends pinned frames of `capacity` bytes.
        capacity: bytes of the largest frame.
        stream: copies frames.
        courier: waits for the copies, and sends; None if this thread does, where the next thing is to receive a frame.
    """

    def __init__(self, transport: SendingEnd, capacity: int, stream: CopyStream, courier: Courier | None) -> None:
        self._transport, self._stream, self._courier = transport, stream, courier
        self._capacity = capacity
        self._free: deque[tuple[Tensor, torch.Event]] = deque()

    def take(self) -> Tensor:
        """A frame on the GPU. Compute writes it only after its last copy: the GPU sees to that."""
        if not self._free:
            return torch.empty(self._capacity, dtype=torch.uint8, device=self._stream.device)
        frame, copied = self._free.popleft()
        self._stream.hold_compute(copied)
        return frame

    def send(self, buffer: Tensor, nbytes: int, what: str, seal: Seal = complete) -> None:
        """Order the copy, and leave the rest to the courier."""
        pinned = self._transport.take()
        copied = self._stream.copy(buffer[:nbytes], pinned[:nbytes], after=self._stream.mark())
        self._free.append((buffer, copied))
        if self._courier is None:
            self._depart(copied, pinned, nbytes, what, seal)
        else:
            self._courier.submit(partial(self._depart, copied, pinned, nbytes, what, seal))

    def _depart(self, copied: torch.Event, pinned: Tensor, nbytes: int, what: str, seal: Seal) -> None:
        copied.synchronize()
        self._transport.send(pinned, nbytes, what, seal)

    def flush(self) -> None:
        """Wait until everything sent has left."""
        if self._courier is not None:
            self._courier.drain()
        self._transport.flush()


class StagedReceiver:
    """A receiving end on a GPU; arguments are as for StagedSender."""

    def __init__(self, transport: ReceivingEnd, capacity: int, stream: CopyStream) -> None:
        self._transport, self._stream, self._capacity = transport, stream, capacity
        self._free: deque[tuple[Tensor, torch.Event]] = deque()
        self._read: deque[tuple[Tensor, torch.Event]] = deque()

    def post(self, count: int, what: str) -> None:
        """Make room for `count` more frames, which may arrive from now on."""
        self._transport.post(count, what)

    def receive(self, what: str) -> Tensor:
        """Wait for the next frame, which is pinned."""
        return self._transport.receive(what)

    def bring(self, frame: Tensor, nbytes: int) -> Tensor:
        """Order the copy, and have compute wait for it on the GPU."""
        # the transport receives into those frames whose copies are done
        while self._read and self._read[0][1].query():
            self._transport.give(self._read.popleft()[0])
        if self._free:
            brought, free = self._free.popleft()
        else:
            brought = torch.empty(self._capacity, dtype=torch.uint8, device=self._stream.device)
            free = self._stream.mark()  # memory that compute has freed may be in use until now
        copied = self._stream.copy(frame[:nbytes], brought[:nbytes], after=free)
        self._stream.hold_compute(copied)
        self._read.append((frame, copied))
        return brought

    def give(self, buffer: Tensor) -> None:
        """The frame on the GPU may be written after what compute was asked for until now."""
        self._free.append((buffer, self._stream.mark()))


class Ways:
    """Makes the ways of one process, which share side streams and couriers for each device."""

    def __init__(self) -> None:
        self._stream, self._rows = cache(CopyStream), cache(_lanes_of_rows)
        self._courier = cache(partial(Courier, "thinwire courier"))

    def departing(self, transport: SendingEnd, capacity: int, device: torch.device, *, at_once: bool) -> SendingEnd:
        """The way from a device; `at_once` if the receiving stage is in this process, which then waits for the copy."""
        if device.type == "cpu":
            return transport
        return StagedSender(transport, capacity, self._stream(device), None if at_once else self._courier(device))

    def arriving(self, transport: ReceivingEnd, capacity: int, device: torch.device) -> ReceivingEnd:
        """The way to a device."""
        if device.type == "cpu":
            return transport
        return StagedReceiver(transport, capacity, self._stream(device))

    def store(self, store: Store, device: torch.device) -> Store:
        """A store as compute on a device sees it: that of a host is reached through pinned memory from a GPU."""
        return store if store.device.type == device.type else StagedStore(store, self._rows(device))


def _lanes_of_rows(device: torch.device) -> RowLanes:
    reader, writer = (Courier(f"thinwire {name} rows", device) for name in ("reads", "writes"))
    return RowLanes(CopyStream(device), reader, writer)
