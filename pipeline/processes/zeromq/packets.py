"""The packets of a connection, in bytes.

A connection goes from the sending process to the receiving process; acknowledgements come back over it.

    hello    sender to receiver, first: who it is, whom it wants to reach, and which of its connections this is
    data     sender to receiver: a piece of a message, numbered along its flow, and whether its ack is awaited
    ack      receiver to sender: the number that is expected next; all before it have arrived. It comes at once if it is
             awaited, else soon, for all packets of that time
    refusal  receiver to sender: the reason, in words, why it takes no more packets
    again    receiver to sender: a part was lost on the way; the next connection begins with what has not arrived

ZeroMQ encrypts the bytes of a part, and not its flags: a changed flag has it drop the part without a word, or join two
packets. So a header has the CRC-32 of its bytes, a receiver looks at the numbers, and a sender waits for an answer no
longer than a silence.

A message is cut into pieces. So an end never makes room for more than one piece before it arrives, and a broken
connection loses pieces, not whole messages. A piece is a packet of two parts: header and bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from isal import isal_zlib

from thinwire.pipeline.errors import WireError

PIECE_BYTES = 1 << 19
"""The most bytes of a message in one packet."""
LARGEST_PART = PIECE_BYTES + 4096
"""Bytes of a part of a packet that ZeroMQ refuses to read, and what encryption adds to a piece is below that."""
VERSION = 7
AGAIN = b"G"
"""The wish for another connection."""

_HELLO = struct.Struct("<cBHIII16s16s")
_DATA = struct.Struct("<c?2xIQQqQQQ")
_ACK = struct.Struct("<c7xQ")


class Stream(NamedTuple):
    """Messages of one stream are taken in the order of sending: a process group and a tag."""

    group: int
    tag: int

    @classmethod
    def of(cls, group_name: str, tag: int) -> Stream:
        """The stream of a tag in a process group."""
        return cls(int.from_bytes(blake2b(group_name.encode(), digest_size=8).digest(), "little"), tag)


@dataclass(frozen=True)
class Hello:
    """The first packet of a connection.

    `life` is the same as long as a process lives, and differs for any other. `attempt` counts the sockets of a
    connection: what an old one sent may be read after what a newer one sent.
    """

    sender: int
    receiver: int
    connection: int
    attempt: int
    sender_life: bytes
    receiver_life: bytes

    def pack(self) -> bytes:
        """The packet as bytes."""
        numbers = self.connection, self.attempt, self.sender, self.receiver
        return _HELLO.pack(b"H", VERSION, *numbers, self.sender_life, self.receiver_life)

    @classmethod
    def unpack(cls, packet: bytes) -> Hello:
        """The packet in these bytes. WireError if they are not one."""
        if len(packet) != _HELLO.size or packet[:1] != b"H":
            raise WireError(f"a hello of {_HELLO.size} bytes was expected, got {packet[:16]!r}")
        _, version, connection, attempt, sender, receiver, here, there = _HELLO.unpack(packet)
        if version != VERSION:
            raise WireError(f"packets of version {VERSION} are understood here, got version {version}")
        return cls(sender, receiver, connection, attempt, here, there)


@dataclass(frozen=True)
class Piece:
    """The place of a data packet's bytes: at `offset` of message `number` of a stream, which has `total` bytes."""

    stream: Stream
    number: int
    offset: int
    total: int

    def pack(self, sequence: int, data: bytes | memoryview, *, awaited: bool) -> bytes:
        """The header of the packet with that number in its flow; `awaited` if the sender waits for its ack."""
        place = *self.stream, self.number, self.offset, self.total
        return _DATA.pack(b"D", awaited, isal_zlib.crc32(data), sequence, *place)

    @classmethod
    def unpack(cls, header: bytes, *data: memoryview) -> tuple[int, bool, Piece]:
        """The number of the packet in its flow, whether its ack is awaited, and the piece.

        WireError if the header is none, or `data` are not the bytes that belong behind it.
        """
        if len(header) != _DATA.size or header[:1] != b"D":
            raise WireError(f"a header of {_DATA.size} bytes was expected, got {header[:16]!r}")
        _, awaited, checksum, sequence, group, tag, number, offset, total = _DATA.unpack(header)
        if [isal_zlib.crc32(part) for part in data] != [checksum]:
            raise WireError("a header and its bytes were expected, got others behind it")
        return sequence, awaited, cls(Stream(group, tag), number, offset, total)


def pieces(stream: Stream, number: int, total: int, *, connections: int = 1) -> list[tuple[Piece, slice]]:
    """The pieces of a message, each with its bytes; an empty message has one empty piece.

    Several connections share a message, so its pieces are smaller.
    """
    largest = max(1, PIECE_BYTES // connections)
    starts = range(0, total, largest) if total else [0]
    return [(Piece(stream, number, start, total), slice(start, min(start + largest, total))) for start in starts]


def pack_ack(expected: int) -> bytes:
    """An ack."""
    return _ACK.pack(b"A", expected)


def pack_refusal(reason: str) -> bytes:
    """A refusal."""
    return b"R" + reason.encode()


def unpack_answer(packet: bytes) -> int | str | None:
    """The number of an ack, the reason of a refusal, or None for `again`. WireError if the bytes are none of these."""
    if packet == AGAIN:
        return None
    if packet[:1] == b"A" and len(packet) == _ACK.size:
        return int(_ACK.unpack(packet)[1])
    if packet[:1] == b"R":
        return packet[1:].decode(errors="replace")
    raise WireError(f"an ack, a refusal or again was expected, got {packet[:16]!r}")
