"""Messages between a stage process and the meeting place: JSON words, and blobs behind them.

bytes of the words | bytes of all blobs | words, with the size of each blob | blobs
"""

from __future__ import annotations

import json
import socket
import struct
from asyncio import StreamReader
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = tuple[dict[str, Any], list[bytes]]
"""Words, and blobs."""
HEAD = struct.Struct("!QQ")


def packed(words: Mapping[str, Any], blobs: Sequence[bytes]) -> Iterator[bytes]:
    """The pieces of a message, in order."""
    text = json.dumps({**words, "sizes": [len(blob) for blob in blobs]}).encode()
    yield HEAD.pack(len(text), sum(map(len, blobs)))
    yield text
    yield from blobs


def send(connection: socket.socket, words: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> None:
    """Send a message, and wait until it has left."""
    for piece in packed(words, blobs):
        connection.sendall(piece)


def receive(connection: socket.socket) -> Message:
    """Wait for a message. EOFError if the other end is gone."""
    text, blobs = HEAD.unpack(_exactly(connection, HEAD.size))
    return _parsed(_exactly(connection, text), _exactly(connection, blobs))


async def read(reader: StreamReader) -> Message:
    """Wait for a message. EOFError if the other end is gone."""
    text, blobs = HEAD.unpack(await reader.readexactly(HEAD.size))
    return _parsed(await reader.readexactly(text), await reader.readexactly(blobs))


def _exactly(connection: socket.socket, count: int) -> bytes:
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise EOFError
        view = view[received:]
    return bytes(buffer)


def _parsed(text: bytes, blobs: bytes) -> Message:
    words: dict[str, Any] = json.loads(text)
    parts, start = [], 0
    for size in words.pop("sizes"):
        parts.append(blobs[start : start + size])
        start += size
    return words, parts
