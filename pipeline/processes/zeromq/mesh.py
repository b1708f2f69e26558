"""The connections of one process to all others of its run: one socket that listens, and sockets that send."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import zmq

from thinwire.pipeline.errors import WireError
from thinwire.pipeline.processes.addresses import joined
from thinwire.pipeline.processes.zeromq.connections import Connection, Packet, Patience, set_up
from thinwire.pipeline.processes.zeromq.flows import Inflow
from thinwire.pipeline.processes.zeromq.keys import Keys
from thinwire.pipeline.processes.zeromq.loop import Loop, received
from thinwire.pipeline.processes.zeromq.mailbox import Mailbox, Pending
from thinwire.pipeline.processes.zeromq.packets import AGAIN, Hello, Piece, Stream, pack_ack, pack_refusal, pieces

_ZAP = "inproc://zeromq.zap.01"
"""The endpoint at which ZeroMQ asks who may connect (its RFC 27)."""
_SOON = 0.1
"""Seconds after which packets are acknowledged whose sender does not wait for it."""
_LAST_WORDS = 1000
"""Milliseconds for the last acknowledgements of a process at its end."""


@dataclass(frozen=True)
class Address:
    """The endpoint of a process, and its life: a text that differs for an earlier or later process there."""

    endpoint: str
    life: bytes


@dataclass
class _Peer:
    """Another process."""

    mailbox: Mailbox = field(default_factory=Mailbox)
    connections: list[Connection] = field(default_factory=list)
    """The connections to it, once something is sent."""
    sent: dict[Stream, int] = field(default_factory=lambda: defaultdict(int))
    """Messages sent to it, by stream."""
    inflows: dict[int, Inflow] = field(default_factory=lambda: defaultdict(Inflow))
    """The packets from it, by the number of its connection."""
    attempts: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """The latest attempt of each of its connections."""
    failed: str | None = None
    """The reason why no message can be exchanged with it any more."""


class Mesh:
    """Sends messages to other processes and receives theirs: complete, once, and in the order of each stream.

    Args:
        rank: the rank of this process.
        keys: the keys of the run.
        interface: the network interface to listen on, or its address (IPv4 or IPv6); no socket listens on another one.
        connections: the number of connections to each process; a long message goes over all of them.
        patience: the times by which connections are watched.

    Attributes:
        address: the address of this process.
    """

    def __init__(
        self,
        rank: int,
        keys: Keys,
        *,
        interface: str,
        connections: int = 1,
        patience: Patience | None = None,
    ) -> None:
        self.rank, self._keys, self._connections = rank, keys, connections
        self._patience = patience or Patience()
        self._addresses: dict[int, Address] = {}
        self._peers: dict[int, _Peer] = {}
        self._senders: dict[bytes, tuple[int, int]] = {}  # by what the inbox calls a connection: process, number
        self._unanswered: set[bytes] = set()  # connections whose packets will be acknowledged soon
        self._early: list[tuple[bytes, Hello]] = []  # of those who know of this process before it knows of them
        self._broken: str | None = None
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._loop = Loop("thinwire mesh", self._break, self._end)
        self.address = Address(self._listen(interface), secrets.token_bytes(16))
        self._loop.start()

    def _listen(self, interface: str) -> str:
        """Make the sockets that listen; the endpoint."""
        # before the inbox: it admits nobody while there is nobody to ask
        self._admission = self._context.socket(zmq.ROUTER)
        self._admission.bind(_ZAP)
        self._loop.watch(self._admission, self._admit)
        self._inbox = self._context.socket(zmq.ROUTER)
        set_up(self._inbox, self._patience)
        self._keys.serve(self._inbox)
        self._inbox.ipv6 = ":" in interface
        self._inbox.bind(f"tcp://{joined(interface, '*')}")
        self._loop.watch(self._inbox, self._receive)
        return self._inbox.get_string(zmq.LAST_ENDPOINT)

    def add_addresses(self, addresses: Mapping[int, Address]) -> None:
        """Take the addresses of other processes. A connection is made when something is sent."""
        self._loop.ask(partial(self._add_addresses, addresses))

    def send(self, peer: int, stream: Stream, data: memoryview) -> Pending:
        """Send a message. Do not change `data` before it is done.

        A short message is done when it is copied; a long one, or one of very many, when the other process has it.
        """
        pending = Pending()
        return self._asked(partial(self._send, peer, stream, data, pending), pending)

    def receive(self, peer: int, stream: Stream, buffer: memoryview) -> Pending:
        """Receive the next message of a stream into `buffer`; it may be shorter."""
        pending = Pending()
        return self._asked(partial(self._post, peer, stream, buffer, pending), pending)

    def describe(self, peer: int) -> str:
        """The state of the connections with another process, in words."""
        connections = [connection.description for connection in self._peer(peer).connections]
        here = "connected" if any(process == peer for process, _ in list(self._senders.values())) else "no connection"
        return "; ".join([*connections, f"{here} from there"])

    def close(self) -> None:
        """Leave when the other processes have all sent messages, or after the farewell time."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + self._patience.farewell
        # first, because a message that was just sent may not be in its connection yet
        self._loop.catch_up(self._patience.farewell)
        while time.monotonic() < deadline and any(connection.left for connection in self._open()):
            time.sleep(0.005)
        self._loop.ask(self._loop.stop)
        self._loop.join()

    def _asked(self, transfer: Callable[[], None], pending: Pending) -> Pending:
        """Ask for a transfer, and give it. A thread that has ended answers nothing; one that ends answers first."""
        self._loop.ask(partial(self._begin, transfer, pending))
        if self._broken is not None:
            pending.end(self._broken)
        return pending

    def _begin(self, transfer: Callable[[], None], pending: Pending) -> None:
        """Begin a transfer; one that fails in its beginning is in no connection and no mailbox yet."""
        try:
            transfer()
        except BaseException as error:
            pending.end(self._reason(error))
            raise

    def _reason(self, error: BaseException) -> str:
        return f"the exchange of process {self.rank} failed: {type(error).__name__}: {error}"

    def _peer(self, number: int) -> _Peer:
        """What is known of a process, from the first time on."""
        if (known := self._peers.get(number)) is None:
            known = self._peers.setdefault(number, _Peer())
        return known

    def _open(self) -> list[Connection]:
        return [connection for peer in list(self._peers.values()) for connection in peer.connections]

    def _add_addresses(self, addresses: Mapping[int, Address]) -> None:
        self._addresses.update(addresses)
        early, self._early = self._early, []
        self._acknowledge(self._greet(came, hello) for came, hello in early)

    def _send(self, peer: int, stream: Stream, data: memoryview, pending: Pending) -> None:
        known = self._peer(peer)
        if (reason := self._broken or known.failed) is not None:
            pending.end(reason)
            return
        if not known.connections:
            known.connections = [self._connect(peer, number) for number in range(self._connections)]
        cut = pieces(stream, known.sent[stream], len(data), connections=self._connections)
        known.sent[stream] += 1
        pending.left = len(cut)
        for index, (piece, part) in enumerate(cut):
            known.connections[index % len(known.connections)].send(Packet(piece, data[part], pending))

    def _post(self, peer: int, stream: Stream, buffer: memoryview, pending: Pending) -> None:
        known = self._peer(peer)
        known.mailbox.post(stream, buffer, pending)
        if (reason := self._broken or known.failed) is not None:
            known.mailbox.fail(reason)

    def _connect(self, peer: int, number: int) -> Connection:
        there = self._addresses[peer]
        hello = Hello(self.rank, peer, number, 0, self.address.life, there.life)
        failed = partial(self._fail, peer)
        return Connection(self._context, self._loop, there.endpoint, hello, self._keys, self._patience, failed)

    def _admit(self) -> None:
        """Answer ZeroMQ's question whether a process may connect."""
        for parts in received(self._admission):
            asking, delimiter, version, request, _, _, _, mechanism, *credentials = [part.bytes for part in parts]
            known = self._keys.admits(mechanism, b"".join(credentials))
            code, text = (b"200", b"") if known else (b"400", b"other keys")
            self._admission.send_multipart([asking, delimiter, version, request, code, text, b"", b""])

    def _receive(self) -> None:
        """Take the packets of all connections, and send one acknowledgement for each connection where it is awaited."""
        self._acknowledge(self._take(*parts) for parts in received(self._inbox) if len(parts) > 1)

    def _acknowledge_all(self) -> None:
        connections, self._unanswered = self._unanswered, set()
        self._acknowledge(connections)

    def _acknowledge(self, connections: Iterable[bytes | None]) -> None:
        """Send the next expected number over each of these connections, once."""
        for connection in dict.fromkeys(connections):
            # one that broke may come with the one that takes its place
            if connection is not None and connection in self._senders:
                process, number = self._senders[connection]
                self._answer(connection, pack_ack(self._peer(process).inflows[number].expected))

    def _take(self, connection: zmq.Frame, header: zmq.Frame, *data: zmq.Frame) -> bytes | None:
        """Take one packet, and give its connection if it is to be acknowledged at once."""
        came, packet = connection.bytes, header.bytes
        try:
            if not data and packet[:1] == b"H":
                return self._greet(came, Hello.unpack(packet))
            if came not in self._senders:
                return None  # an old connection, or a refused one
            process, number = self._senders[came]
            peer = self._peer(process)
            sequence, awaited, piece = Piece.unpack(packet, *(part.buffer for part in data))
        except WireError as error:
            if came not in self._senders:
                self._answer(came, pack_refusal(f"process {self.rank} does not understand it: {error}"))
            else:
                self._lose(came)
            return None
        if sequence > peer.inflows[number].expected:
            self._lose(came)
            return None
        if peer.inflows[number].takes(sequence):
            peer.mailbox.take(piece, data[0].buffer)
        if awaited:
            return came
        # one acknowledgement stands for the packets of some time: it costs more than a short message
        if not self._unanswered:
            self._loop.later(_SOON, self._acknowledge_all)
        self._unanswered.add(came)
        return None

    def _lose(self, came: bytes) -> None:
        """Ask for another connection in place of one that lost a part, and take nothing more from this one."""
        del self._senders[came]
        self._answer(came, AGAIN)

    def _greet(self, came: bytes, hello: Hello) -> bytes | None:
        """Accept a new connection, if it is from a process of this run to this one."""
        if not self._addresses:
            self._early.append((came, hello))
            return None
        there = self._addresses.get(hello.sender)
        if there is None or hello.receiver != self.rank or hello.receiver_life != self.address.life:
            self._answer(came, pack_refusal(f"process {hello.receiver} of this run does not listen there"))
            return None
        if hello.sender_life != there.life:
            self._answer(came, pack_refusal(f"process {hello.sender} of this run is another one"))
            return None
        latest, here = self._peer(hello.sender).attempts, (hello.sender, hello.connection)
        if hello.attempt < latest[hello.connection]:
            return None  # it broke before it was read
        latest[hello.connection] = hello.attempt
        self._senders = {old: way for old, way in self._senders.items() if way != here} | {came: here}
        return came

    def _answer(self, connection: bytes, *parts: bytes | memoryview) -> None:
        self._inbox.send_multipart([connection, *parts], zmq.NOBLOCK, copy=False)

    def _fail(self, peer: int, reason: str) -> None:
        """End all exchange with a process."""
        known = self._peer(peer)
        known.failed = known.failed or f"process {peer} ended the exchange: {reason}"
        for connection in known.connections:
            connection.fail(known.failed)
        known.mailbox.fail(known.failed)

    def _break(self, error: BaseException) -> None:
        """End all transfers, because this thread must end."""
        self._broken = self._reason(error)
        for peer in list(self._peers):
            self._fail(peer, self._broken)

    def _end(self) -> None:
        """Close all sockets, after the last acknowledgements are sent."""
        if self._broken is None:
            self._acknowledge_all()
        for connection in self._open():
            connection.close()
        self._inbox.linger = _LAST_WORDS
        self._inbox.close()
        self._admission.close()
        self._context.destroy()  # it would wait for ever for a socket that a failure has left open
