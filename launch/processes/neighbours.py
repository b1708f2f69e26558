"""Heartbeats between neighbours of a pipeline: each pair of processes has a connection of its own for them.

torchrun does not notice a process that is alive and silent, and no launcher sees the processes of other hosts. So the
two processes of a boundary listen to each other. A process that receives nothing from a neighbour ends, and torchrun
starts all of them again.

The process of the lower rank listens on the interface of the run, until its neighbours have called. A message is 21
bytes: the token of the run, the rank of its sender, and what the sender does. A connection that sends anything
else is closed. A connection that ends is no silence: in training, gloo notices an end itself. Before its first step a
stage waits in the rendezvous store, which notices nothing. So there a neighbour whose connection ends is lost.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from thinwire.launch.processes.heartbeat import Pulse, Silence
from thinwire.launch.shared.doing import Doing
from thinwire.launch.shared.interfaces import host_address
from thinwire.pipeline.errors import PeerError, WireError
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.processes.addresses import interface_addresses, is_address, joined, listening, parted
from thinwire.pipeline.processes.placement import Placement

_TOKEN_BYTES = 16
_MESSAGE = struct.Struct(f"!{_TOKEN_BYTES}sIc")
_SAID = {doing.value for doing in Doing}
_POLL = 0.1
_ENDED = "closed its connection before the first step: its process has ended, as its output says, or the link was cut"
_GRACE = 2.0
"""Seconds after such an end in which a process may still say what it has found itself."""
_MOST_STRANGERS = 16
"""Connections that have not named themselves yet; the oldest goes for a new one."""


class Neighbours:
    """The neighbours of this process, read on a thread of their own. Creating it is collective.

    They get the pulse of this process; they may be silent as `silence` says. It waits for them `timeout` seconds.

    Raises:
        PeerError: a neighbour cannot be reached.
    """

    def __init__(self, where: Placement, rank: int, pulse: Pulse, silence: Silence, timeout: float) -> None:
        self._rank, self._pulse, self._silence = rank, pulse, silence
        self._buffers: dict[socket.socket, bytearray] = {}
        self._ranks: dict[socket.socket, int] = {}
        self._waiting = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._ended: dict[int, float] = {}
        pairs = where.watched(rank)
        self._missing = {above for below, above in pairs if below == rank}
        mine = self._listen() if self._missing else None
        # not by way of the store, which would not notice the end of a process
        told = collectives.everyone(where, [secrets.token_hex(_TOKEN_BYTES // 2), mine])
        self._token = str(told[0][0]).encode()
        for below in (below for below, above in pairs if above == rank):
            self._call(below, told[below][1], timeout)
        collectives.barrier(where, "waiting for the heartbeats of all others")

    def begin(self, lost: Callable[[int, str], None]) -> None:
        """Listen from now on; `lost` is called with the rank of a lost neighbour, and what is wrong with it."""
        threading.Thread(target=self._receive, args=[lost], name="neighbours", daemon=True).start()

    def _listen(self) -> tuple[str, int]:
        """Where the neighbours call."""
        address = run_address()
        self._listener = listening(address)
        self._listener.setblocking(False)
        self._waiting.register(self._listener, selectors.EVENT_READ)
        return address, self._listener.getsockname()[1]

    def _call(self, rank: int, told: Any, timeout: float) -> None:
        what = f"process {self._rank} was waiting for the heartbeat of process {rank}"
        try:
            host, port = parted(joined(*told))
            if not is_address(host):
                raise ValueError(f"{host} is no address")
        except (ValueError, TypeError) as error:
            raise WireError(f"process {rank} must send its address, and sent {str(told)[:80]!r}") from error
        try:
            connection = socket.create_connection((host, port), timeout)
        except OSError as error:
            raise PeerError(
                f"{what}, and {host} does not answer at port {port}: {error.strerror or error}; stages must reach all "
                f"ports of each other, on the interface of GLOO_SOCKET_IFNAME"
            ) from error
        self._add(connection)
        self._greet(connection, rank)

    def _receive(self, lost: Callable[[int, str], None]) -> None:
        while True:
            for key, _ in self._waiting.select(_POLL):
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj is self._listener:
                    with suppress(OSError):  # who called has gone again
                        self._add(self._listener.accept()[0])
                else:
                    self._read(key.fileobj)
            if self._listener is not None and not self._missing:
                self._waiting.unregister(self._listener)
                self._listener.close()
                self._listener = None
            ended = {rank: _ENDED for rank, at in self._ended.items() if time.monotonic() - at > _GRACE}
            for rank, said in (ended | self._silence.too_long()).items():
                self._silence.forget(rank)
                self._ended.pop(rank, None)
                lost(rank, said)

    def _add(self, connection: socket.socket) -> None:
        strangers = [known for known in self._buffers if known not in self._ranks]
        if len(strangers) >= _MOST_STRANGERS:
            self._close(strangers[0])
        connection.setblocking(False)
        self._buffers[connection] = bytearray()
        self._waiting.register(connection, selectors.EVENT_READ)

    def _greet(self, connection: socket.socket, rank: int) -> None:
        """From now on the connection is that of a neighbour."""
        self._ranks[connection] = rank
        self._missing.discard(rank)
        self._silence.received(rank, Doing.BUILDING)
        self._send(connection, self._pulse.doing())  # at once: who has not named itself may have to go for a stranger
        self._pulse.add(partial(self._send, connection))

    def _send(self, connection: socket.socket, doing: Doing) -> None:
        try:
            connection.send(_MESSAGE.pack(self._token, self._rank, doing.value))
        except OSError:
            return  # closed, or full because the neighbour does not read: it gets no more of ours, as it should

    def _read(self, connection: socket.socket) -> None:
        if connection not in self._buffers:
            return  # it went for a new one in this round
        try:
            received = connection.recv(1 << 12)
        except OSError:
            received = b""
        buffer = self._buffers[connection]
        buffer += received
        while received and len(buffer) >= _MESSAGE.size:
            token, rank, said = _MESSAGE.unpack_from(buffer)
            del buffer[: _MESSAGE.size]
            if connection not in self._ranks and rank in self._missing and secrets.compare_digest(token, self._token):
                self._greet(connection, rank)
            if token != self._token or self._ranks.get(connection) != rank or said not in _SAID:
                received = b""
            else:
                self._silence.received(rank, Doing(said))
        if not received:
            self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        self._waiting.unregister(connection)
        del self._buffers[connection]
        rank = self._ranks.pop(connection, None)
        if rank is not None:
            self._silence.forget(rank)
            if self._pulse.doing() is Doing.BUILDING:
                self._ended[rank] = time.monotonic()
        connection.close()


def run_address() -> str:
    """The address of this host on the interface of the run, as gloo finds it."""
    asked = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    addresses = interface_addresses().get(asked, [])
    return addresses[0] if addresses else host_address()
