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

from thinwire.pipeline.errors import WireError

Message = tuple[dict[str, Any], list[bytes]]
"""Words, and blobs."""
HEAD = struct.Struct("!QQ")
LONGEST_WORDS = 1 << 20
"""The most bytes of words that are read from another host."""


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
    """Wait for a message. EOFError if the other end is gone, WireError if this is none."""
    text, blobs = HEAD.unpack(_exactly(connection, HEAD.size))
    return _parsed(_exactly(connection, text), _exactly(connection, blobs))


async def read(reader: StreamReader, largest: int | None = None) -> Message:
    """Wait for a message. EOFError if the other end is gone, WireError if this is none.

    Args:
        reader: where it arrives.
        largest: the most bytes of its blobs; None if its sender is trusted.
    """
    text, blobs = HEAD.unpack(await reader.readexactly(HEAD.size))
    if largest is not None and (text > LONGEST_WORDS or blobs > largest):
        raise WireError(
            f"a message must have at most {LONGEST_WORDS} bytes of words and {largest} bytes of blobs, got {text} and "
            f"{blobs}"
        )
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
    try:
        words = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError("the words of a message must be JSON") from error
    sizes = words.pop("sizes", None) if isinstance(words, dict) else None
    if not isinstance(sizes, list) or not all(map(is_count, sizes)) or sum(sizes) != len(blobs):
        raise WireError(f"a message must say the sizes of its blobs, which have {len(blobs)} bytes, got {sizes!r:.60}")
    parts, start = [], 0
    for size in sizes:
        parts.append(blobs[start : start + size])
        start += size
    return words, parts


def is_count(value: object) -> bool:
    """Whether a value of JSON is a whole number from 0 on, of at most 63 bits."""
    return type(value) is int and 0 <= value < 1 << 63
