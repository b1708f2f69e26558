"""A stream of messages in each direction between a proxy and the server, over one connection after the other.

A connection carries packets of two parts: a kind with a number, and bytes.

    hello    proxy to server, first: who it is, as JSON; the number is the version of these packets
    welcome  server to proxy: the identifier of the server; the number is that of the piece that it expects next
    refusal  server to proxy: why not, as JSON
    unknown  server to proxy: it does not know this connection, and waits for a hello
    piece    a piece of the stream, with its number
    ack      the number of the piece that is expected next; sent every moment, so it is the heartbeat too

A connection that breaks may lose pieces. They are kept until the other end has them, and sent again over the next
connection. So each is taken once and in order, as long as both ends live.
"""

from __future__ import annotations

import json
import struct
from asyncio import StreamReader
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from thinwire.pipeline.errors import WireError
from thinwire.pipeline.replicas.membership.messages import Message, packed, read
from thinwire.pipeline.zeromq.flows import Inflow, Outflow

VERSION = 2
HELLO, WELCOME, REFUSAL, UNKNOWN, PIECE, ACK = b"H", b"W", b"R", b"U", b"P", b"A"
LAUNCHER = -1
"""Stands for the launcher, where others have the number of a stage process."""
PIECE_BYTES = 1 << 14
"""The most bytes of a piece: one must arrive within the time of a heartbeat, with what others send over its link."""

_HEAD = struct.Struct("!cQ")
_PROCESS = struct.Struct("!i")

Send = Callable[[bytes, int, bytes], None]
"""Sends a packet over a connection: its kind, its number and its bytes."""


def pack(kind: bytes, number: int, data: bytes = b"") -> list[bytes]:
    """The two parts of a packet."""
    return [_HEAD.pack(kind, number), data]


def unpack(parts: Sequence[bytes]) -> tuple[bytes, int, bytes]:
    """Kind, number and bytes of a packet. WireError if it is none."""
    if len(parts) != 2 or len(parts[0]) != _HEAD.size:
        raise WireError(f"a packet of two parts was expected, got {len(parts)}")
    kind, number = _HEAD.unpack(parts[0])
    return kind, number, parts[1]


def pack_words(kind: bytes, number: int, **words: Any) -> list[bytes]:
    """A packet with words."""
    return pack(kind, number, json.dumps(words).encode())


class MessageStream:
    """One end of the streams. Create it where an event loop runs."""

    def __init__(self) -> None:
        self._out: Outflow[bytes] = Outflow()
        self._in = Inflow()
        self._reader = StreamReader()
        self._send: Send | None = None

    @property
    def expected(self) -> int:
        """The number of the next piece."""
        return self._in.expected

    @property
    def left(self) -> int:
        """Pieces that were written, and that the other end does not have."""
        return len(self._out)

    def begin(self, send: Send, expected: int) -> None:
        """Go on over a new connection, whose other end expects this piece. WireError if it was never sent."""
        self.acknowledge(expected)
        self._send = send
        for number, piece in self._out.kept():
            send(PIECE, number, piece)

    def interrupt(self) -> None:
        """Keep what is written until the next connection."""
        self._send = None

    def write(self, process: int, words: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """Send a message of a process, or to it; now, or as soon as there is a connection."""
        for part in (_PROCESS.pack(process), *packed(words, blobs)):
            for start in range(0, len(part), PIECE_BYTES):
                piece = part[start : start + PIECE_BYTES]
                number = self._out.add(piece)
                if self._send is not None:
                    self._send(PIECE, number, piece)

    async def read(self, largest: int | None = None) -> tuple[int, Message]:
        """Wait for a message: the process that it is of or for, and what it says. Errors as `messages.read`."""
        [process] = _PROCESS.unpack(await self._reader.readexactly(_PROCESS.size))
        return process, await read(self._reader, largest)

    def take(self, number: int, piece: bytes) -> None:
        """Take a piece, if it is the next one."""
        if self._in.takes(number):
            self._reader.feed_data(piece)

    def acknowledge(self, expected: int) -> None:
        """Forget the pieces that the other end has. WireError if it cannot have them."""
        if self._out.acknowledge(expected) is None:
            raise WireError(f"piece {expected} was never sent, and is said to be the next")
