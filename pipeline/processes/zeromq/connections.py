"""One connection to one process: a socket until it breaks, then another socket.

ZeroMQ could reconnect a socket by itself. But it would then send the queued packets, without those that the old
connection lost. A new socket for every connection keeps the order: hello, the answer that says what has arrived, the
rest.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

import zmq
from zmq.utils.monitor import parse_monitor_message

from thinwire.pipeline.errors import WireError
from thinwire.pipeline.processes.addresses import is_address, parted
from thinwire.pipeline.processes.zeromq.flows import Outflow
from thinwire.pipeline.processes.zeromq.keys import Keys
from thinwire.pipeline.processes.zeromq.loop import Loop, Socket, received
from thinwire.pipeline.processes.zeromq.mailbox import Pending
from thinwire.pipeline.processes.zeromq.packets import LARGEST_PART, Hello, Piece, unpack_answer

COPIED_BYTES = 1 << 18
"""A piece of at most so many bytes is copied, so that its message is done before it is acknowledged."""
_COPIES_BYTES = 1 << 22
"""The most bytes of such copies that a connection keeps."""
_LOOK = 0.5
"""Seconds that a look at a port may take."""
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
)


@dataclass(frozen=True, kw_only=True)
class Patience:
    """The times by which connections are watched, in seconds."""

    heartbeat: float = 5.0
    """The time between two heartbeats, if nothing else is sent."""
    silence: float = 20.0
    """The longest silence. After it, a new connection replaces this one; so a piece must arrive, and be acknowledged,
    within this time."""
    retry: float = 0.1
    """The pause before a failed connection is tried again; if nothing answers, it grows to twenty times this value."""
    gone: float = 3.0
    """The time for which a host refuses connections before its process counts as ended: a living one listens."""
    farewell: float = 60.0
    """The time that a process waits at its end until its last packets are acknowledged: for several connections, if the
    links break just then. Who waits for a process that has ended learns it sooner."""


def set_up(socket: Socket, patience: Patience) -> None:
    """Let a socket refuse parts longer than our longest, drop nothing, and watch its connections."""
    socket.maxmsgsize = LARGEST_PART
    socket.sndhwm = socket.rcvhwm = 0  # the flow limits the number of packets
    socket.linger = 0
    socket.heartbeat_ivl, socket.heartbeat_timeout = _milliseconds(patience.heartbeat), _milliseconds(patience.silence)
    socket.handshake_ivl = socket.connect_timeout = _milliseconds(patience.silence)
    socket.reconnect_ivl, socket.reconnect_ivl_max = _milliseconds(patience.retry), _milliseconds(20 * patience.retry)


@dataclass(frozen=True)
class Packet:
    """A piece of a message, and its bytes; `awaited` if they are those of the message, and no copy."""

    piece: Piece
    data: memoryview
    message: Pending
    awaited: bool = True


class Standing(Enum):
    """The states of a connection, in words."""

    CONNECTING = "not connected"
    GREETING = "connected, and waiting for its first answer"
    READY = "connected"


class Connection:
    """One connection to a process, and the flows of packets over it and all its successors.

    Args:
        loop: the thread in which all of this runs.
        endpoint: the address at which the other process listens.
        hello: the first packet.
        failed: called with the reason if the other process refuses all further packets.
    """

    def __init__(
        self,
        context: zmq.Context[Socket],
        loop: Loop,
        endpoint: str,
        hello: Hello,
        keys: Keys,
        patience: Patience,
        failed: Callable[[str], None],
    ) -> None:
        self._context, self._loop, self._endpoint, self._hello = context, loop, endpoint, hello
        self._keys, self._patience, self._failed = keys, patience, failed
        self._trouble = ""
        self._flow: Outflow[Packet] = Outflow()
        self._copies = 0  # their bytes in the flow
        self.state = Standing.CONNECTING
        self._host, self._port = parted(endpoint.removeprefix("tcp://"))
        self._refused: float | None = None  # since when nothing listens there
        self._begin()

    @property
    def left(self) -> int:
        """Packets that are not acknowledged."""
        return len(self._flow)

    @property
    def description(self) -> str:
        """The state of the connection, in words."""
        return f"{self.state.value} to {self._endpoint}{self._trouble if self.state is Standing.CONNECTING else ''}"

    def _begin(self) -> None:
        """Begin the first connection, or another one; later, if this process has too many files open."""
        self._is_open, self._was_reset = False, False
        try:
            self._socket, self._monitor = self._sockets()
        except zmq.ZMQError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._trouble = ": too many files are open here"  # strangers may hold connections to this process
            self._loop.later(self._patience.retry, self._begin)
            return
        self._is_open = True
        self._hello = replace(self._hello, attempt=self._hello.attempt + 1)
        self._loop.watch(self._socket, self._receive)
        self._loop.watch(self._monitor, self._notice)
        self._socket.connect(self._endpoint)

    def _sockets(self) -> tuple[Socket, Socket]:
        """The socket of a connection, and the one that reports its events."""
        made = self._context.socket(zmq.DEALER)
        try:
            set_up(made, self._patience)
            self._keys.prove(made)
            made.ipv6 = ":" in self._host or not is_address(self._host)  # a name may stand for either
            return made, made.get_monitor_socket(_EVENTS)
        except zmq.ZMQError:
            made.close()
            raise

    def close(self) -> None:
        """Close the connection, and drop the packets in its queue."""
        if not self._is_open:
            return
        self._is_open = False
        self.state = Standing.CONNECTING
        self._loop.forget(self._socket)
        self._loop.forget(self._monitor)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()

    def send(self, packet: Packet) -> None:
        """Send a packet, at once or as soon as there is a connection."""
        packet = self._copied(packet)
        sequence = self._flow.add(packet)
        if self.state is Standing.READY:
            self._transmit(sequence, packet)

    def fail(self, reason: str) -> None:
        """End all messages that are being sent."""
        for _, packet in self._flow.kept():
            packet.message.end(reason)
        self._flow, self._copies = Outflow(), 0

    def _copied(self, packet: Packet) -> Packet:
        """A packet with bytes of its own, if they are few: nobody waits until it is acknowledged."""
        nbytes = len(packet.data)
        if nbytes > COPIED_BYTES or self._copies + nbytes > _COPIES_BYTES:
            return packet
        self._copies += nbytes
        packet.message.end_piece()
        return replace(packet, data=memoryview(bytes(packet.data)), awaited=False)

    def _transmit(self, sequence: int, packet: Packet) -> None:
        # without a copy: nobody writes these bytes before they are acknowledged
        self._write(packet.piece.pack(sequence, packet.data, awaited=packet.awaited), packet.data)

    def _write(self, *parts: bytes | memoryview) -> None:
        # ZeroMQ takes nothing over a connection that ended with a wrong byte: the event that says so is on its way
        with suppress(zmq.Again):
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False)

    def _notice(self) -> None:
        """Handle an event of the connection."""
        for parts in received(self._monitor):
            told = parse_monitor_message([part.bytes for part in parts])
            event = told["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.state = Standing.GREETING
                self._refused = None
                self._write(self._hello.pack())
                self._watch(self._hello.attempt)
            elif event == zmq.EVENT_CONNECT_RETRIED:
                self._trouble = self._trouble or ": nothing answers there"
                self._look_for_an_end()
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:  # the end of the connection is reported next
                self._was_reset = told["value"] == errno.ECONNRESET
            else:
                self._begin_again()
                return

    def _begin_again(self) -> None:
        """Replace a connection that has ended.

        ZeroMQ would not always: an answer that it does not understand, or a wrong byte, ends a socket's connection for
        good.
        """
        self._refused, self._trouble = None, ""
        pause = 0.0
        if self.state is Standing.CONNECTING:
            # who has other keys closes the connection in order; a reset says nothing about keys
            stranger = "what answers there is no process with the same keys"
            self._trouble = f": {'the connection was reset' if self._was_reset else stranger}"
            pause = self._patience.retry
        self.close()
        self._loop.later(pause, self._begin)

    def _watch(self, attempt: int, awaited: int | None = None) -> None:
        """Replace a connection whose hello (-1) or oldest packet `awaited` an answer a silence ago, and still does.

        Its part or its answer was lost. Heartbeats go on then.
        """
        if attempt != self._hello.attempt or self.state is Standing.CONNECTING:
            return
        oldest = -1 if self.state is Standing.GREETING else next((number for number, _ in self._flow.kept()), None)
        if oldest is not None and oldest == awaited:
            self._begin_again()
        else:
            self._loop.later(self._patience.silence, partial(self._watch, attempt, oldest))

    def _look_for_an_end(self) -> None:
        """Give the process up if its host has refused connections for long enough. A host out of reach refuses none."""
        refused = False
        try:
            socket.create_connection((self._host, self._port), _LOOK).close()
        except ConnectionRefusedError:
            refused = True
        except (OSError, UnicodeError):  # too many files may be open here
            pass
        if not refused:
            self._refused = None
        elif self._refused is None:
            self._refused = time.monotonic()
        elif time.monotonic() - self._refused > self._patience.gone:
            self._failed("it does not listen any more, so it has ended")

    def _receive(self) -> None:
        """Handle what the other process answers."""
        for header, *_ in received(self._socket):
            try:
                answer = unpack_answer(header.bytes)
            except WireError as error:
                self._failed(str(error))
                return
            if isinstance(answer, str):
                self._failed(answer)
                return
            if answer is None:
                self._begin_again()
                return
            self._acknowledge(answer)

    def _acknowledge(self, expected: int) -> None:
        """Let the packets go that the other process has; over a new connection, send the others again."""
        gone = self._flow.acknowledge(expected)
        if gone is None:
            self._failed(f"it acknowledges packet {expected}, which was never sent")
            return
        for packet in gone:
            if packet.awaited:
                packet.message.end_piece()
            else:
                self._copies -= len(packet.data)
        if self.state is Standing.GREETING:
            self.state = Standing.READY
            for sequence, packet in self._flow.kept():
                self._transmit(sequence, packet)


def _milliseconds(seconds: float) -> int:
    return max(1, round(1e3 * seconds))
