"""Pieces of messages, and the receives that take them."""

import os

import pytest

from thinwire.pipeline.errors import WireError
from thinwire.pipeline.processes.zeromq.mailbox import Mailbox, Pending
from thinwire.pipeline.processes.zeromq.packets import PIECE_BYTES, Hello, Piece, Stream, pieces, unpack_answer

STREAM, OTHER = Stream(1, 0), Stream(1, 7)


class Receive:
    """A posted receive."""

    def __init__(self, mailbox, nbytes, stream=STREAM):
        self.buffer, self.pending = bytearray(nbytes), Pending()
        mailbox.post(stream, memoryview(self.buffer), self.pending)


def piece(data, *, number=0, offset=0, total=None, stream=STREAM):
    return Piece(stream, number, offset, len(data) if total is None else total), memoryview(data)


def test_messages_are_taken_in_the_order_of_their_stream():
    mailbox = Mailbox()
    first = Receive(mailbox, 3)
    mailbox.take(*piece(b"second", number=1))
    mailbox.take(*piece(b"other", stream=OTHER))
    assert not first.pending.ended
    mailbox.take(*piece(b"one"))
    second, other = Receive(mailbox, 6), Receive(mailbox, 5, OTHER)
    assert [bytes(receive.buffer) for receive in (first, second, other)] == [b"one", b"second", b"other"]
    assert all(receive.pending.ended and receive.pending.error is None for receive in (first, second, other))


def test_pieces_make_a_message_in_any_order():
    mailbox = Mailbox()
    mailbox.take(*piece(b"ef", offset=4, total=6))
    receive = Receive(mailbox, 8)
    mailbox.take(*piece(b"ab", offset=0, total=6))
    assert not receive.pending.ended
    mailbox.take(*piece(b"cd", offset=2, total=6))
    assert (receive.pending.error, bytes(receive.buffer)) == (None, b"abcdef\0\0")


def test_an_empty_message_is_one():
    mailbox = Mailbox()
    [(only, part)] = pieces(STREAM, 0, 0)
    mailbox.take(only, memoryview(b"")[part])
    assert Receive(mailbox, 4).pending.ended


def test_a_message_that_is_too_long_fails_its_receive_and_no_other():
    mailbox = Mailbox()
    receive = Receive(mailbox, 4)
    mailbox.take(*piece(b"abc", total=6))
    mailbox.take(*piece(b"def", offset=3, total=6))
    mailbox.take(*piece(b"next", number=1))
    assert receive.pending.error == "6 bytes came where 4 at most are expected"
    assert bytes(receive.buffer) == bytes(4)
    assert bytes(Receive(mailbox, 4).buffer) == b"next"


@pytest.mark.parametrize(
    "wrong",
    [piece(b"ab", offset=1 << 62, total=4), piece(b"abcd", offset=1, total=4), piece(b"abcd", total=2)],
)
def test_pieces_that_fit_no_message_are_refused(wrong):
    mailbox = Mailbox()
    receive = Receive(mailbox, 4)
    mailbox.take(*wrong)
    assert "pieces came that do not make a message" in receive.pending.error
    assert bytes(receive.buffer) == bytes(4)


def test_a_long_message_is_cut_without_a_gap():
    cut = pieces(STREAM, 3, 2 * PIECE_BYTES + 1)
    assert [(piece.offset, part) for piece, part in cut] == [
        (0, slice(0, PIECE_BYTES)),
        (PIECE_BYTES, slice(PIECE_BYTES, 2 * PIECE_BYTES)),
        (2 * PIECE_BYTES, slice(2 * PIECE_BYTES, 2 * PIECE_BYTES + 1)),
    ]
    assert {piece.total for piece, _ in cut} == {2 * PIECE_BYTES + 1}


@pytest.mark.parametrize("connections", [2, 3, 64])
def test_several_connections_share_a_message_that_would_be_one_piece(connections):
    message = os.urandom(PIECE_BYTES)
    cut = pieces(STREAM, 3, len(message), connections=connections)
    assert len(cut) >= connections
    assert b"".join(message[part] for _, part in cut) == message
    assert [piece.offset for piece, _ in cut] == [part.start for _, part in cut]


def test_packets_are_read_as_they_were_written():
    hello = Hello(sender=3, receiver=1, connection=2, attempt=4, sender_life=b"s" * 16, receiver_life=b"r" * 16)
    assert Hello.unpack(hello.pack()) == hello
    one = Piece(Stream.of("a group", -1), 5, 1 << 40, 1 << 41)
    for awaited in (True, False):
        header = one.pack(9, b"bytes", awaited=awaited)
        assert Piece.unpack(header, memoryview(b"bytes")) == (9, awaited, one)
        with pytest.raises(WireError, match="others behind it"):
            Piece.unpack(header, memoryview(b"bites"))


@pytest.mark.parametrize("read", [Hello.unpack, Piece.unpack, unpack_answer])
@pytest.mark.parametrize("garbage", [b"", b"A", b"\xff" * 8, b"X" * 48, b"D" * 400])
def test_garbage_is_no_packet(read, garbage):
    with pytest.raises(WireError):
        read(garbage)
