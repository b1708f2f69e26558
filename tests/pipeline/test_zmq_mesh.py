"""Two meshes on loopback with a relay between them: what arrives, whatever happens to the connections."""

import errno
import os
import random
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from threading import Event

import pytest

zmq = pytest.importorskip("zmq", reason="needs pyzmq")

from zmq.utils.monitor import parse_monitor_message  # noqa: E402

from support.relay import Relay  # noqa: E402
from support.two_meshes import KEYS, LONG, QUICK, STREAM, Two, arrived, stranger_at, until  # noqa: E402
from thinwire.pipeline.processes.zeromq import connections as connections_room  # noqa: E402
from thinwire.pipeline.processes.zeromq import mesh as mesh_room  # noqa: E402
from thinwire.pipeline.processes.zeromq.connections import COPIED_BYTES, Patience  # noqa: E402
from thinwire.pipeline.processes.zeromq.keys import Keys  # noqa: E402
from thinwire.pipeline.processes.zeromq.mesh import Address, Mesh  # noqa: E402
from thinwire.pipeline.processes.zeromq.packets import LARGEST_PART, PIECE_BYTES, Hello, Piece, unpack_answer  # noqa: E402


@pytest.fixture(autouse=True)
def nothing_is_copied(monkeypatch):
    """Then a send that is done says that the other process has the message."""
    monkeypatch.setattr(connections_room, "COPIED_BYTES", -1)


def test_messages_arrive_in_order_and_then_their_sends_are_done():
    with Two() as two:
        sends = [two.send(bytes([number]) * (PIECE_BYTES + number)) for number in range(5)]
        for number in range(5):
            assert arrived(two.receive(PIECE_BYTES + number)) == bytes([number]) * (PIECE_BYTES + number)
        assert all(send.wait(LONG) and send.error is None for send in sends)


@pytest.mark.slow
def test_a_short_message_is_done_before_it_arrives_unless_there_are_very_many(monkeypatch):
    monkeypatch.setattr(connections_room, "COPIED_BYTES", COPIED_BYTES)
    with Two(acquainted=False) as two:
        data = bytearray(os.urandom(COPIED_BYTES))
        sent, sends = bytes(data), [two.send(data) for _ in range(16)]
        assert all(send.wait(LONG) for send in sends)
        data[:] = bytes(COPIED_BYTES)  # they are copied
        late = two.send(sent)
        assert not late.wait(0.5), "what waits must not grow for ever"
        two.acquaint()
        assert [arrived(two.receive(COPIED_BYTES)) for _ in range(17)] == [sent] * 17
        assert late.wait(LONG) and late.error is None
        assert two.send(b"short again").wait(LONG)


@pytest.mark.slow
def test_one_acknowledgement_stands_for_several_packets_that_nobody_waits_for(monkeypatch):
    monkeypatch.setattr(mesh_room, "_SOON", 1)
    with Two() as two, stranger_at(two, KEYS.public, KEYS.secret) as (sender, _):
        sender.send(Hello(0, 1, 0, 1, *(mesh.address.life for mesh in two.meshes)).pack())
        assert sender.poll(1000 * LONG) and unpack_answer(sender.recv()) == 0
        for sequence in range(4):
            sender.send_multipart([Piece(STREAM, sequence, 0, 1).pack(sequence, b"x", awaited=False), b"x"])
        assert [arrived(two.receive(1)) for _ in range(4)] == [b"x"] * 4
        assert sender.poll(1000 * LONG)
        answers = [unpack_answer(sender.recv())]
        while answers[-1] < 4:
            answers.append(unpack_answer(sender.recv()))
        assert len(answers) < 4


def test_what_is_sent_is_encrypted():
    with Two() as two:
        assert two.send(b"a secret" * 1000).wait(LONG)
        assert len(two.relay.seen) > 8000
        assert b"CURVE" in two.relay.seen
        assert b"secret" not in two.relay.seen


@pytest.mark.slow
@pytest.mark.parametrize("connections", [1, 3])
def test_reset_connections_lose_nothing(connections):
    """The relay resets all connections again and again while messages of many pieces are under way."""
    messages = [os.urandom(8 * PIECE_BYTES + 1000 * number) for number in range(30)]
    with Two(connections=connections) as two:
        receives = [two.receive(len(message)) for message in messages]
        sends = []
        for message in messages:
            sends.append(two.send(message))
            time.sleep(0.02)
            two.relay.cut()
        assert [arrived(receive) for receive in receives] == messages
        assert all(send.wait(LONG) and send.error is None for send in sends)
        assert two.relay.accepted > connections


def test_a_connection_waits_while_too_many_files_are_open(monkeypatch):
    """Strangers held all connections that a process may have; when its own broke, its run ended."""
    refused, genuine = [], connections_room.set_up

    def full(socket, patience):
        if len(refused) < 3:
            refused.append(socket)
            socket.close()
            raise zmq.ZMQError(errno.EMFILE)
        genuine(socket, patience)

    with Two() as two:
        assert two.send(b"before").wait(LONG)
        monkeypatch.setattr(connections_room, "set_up", full)
        two.relay.cut()
        send = two.send(b"after")
        assert [arrived(two.receive(6)), arrived(two.receive(5))] == [b"before", b"after"]
        assert send.wait(LONG) and send.error is None and len(refused) == 3


@pytest.mark.slow
def test_a_silent_connection_is_given_up_for_a_new_one():
    with Two() as two:
        assert two.send(b"before").wait(LONG)
        accepted = two.relay.accepted
        two.relay.hush()
        send = two.send(b"during")
        deadline = time.monotonic() + LONG
        while two.relay.accepted == accepted:
            assert time.monotonic() < deadline, "it waits for the silent one"
            time.sleep(0.02)
        assert not send.ended, "nothing can have come through"
        two.relay.go_on()
        assert (arrived(two.receive(6)), arrived(two.receive(6))) == (b"before", b"during")
        assert send.wait(LONG)


@pytest.mark.slow
def test_a_process_that_comes_late_gets_what_was_sent_before():
    with ExitStack() as stack:
        early = Mesh(0, KEYS, interface="127.0.0.1", patience=QUICK)
        stack.callback(early.close)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            target = probe.getsockname()[1]
        relay = Relay(f"tcp://127.0.0.1:{target}")
        stack.callback(relay.close)
        late = Mesh(1, KEYS, interface="127.0.0.1", patience=QUICK)
        stack.callback(late.close)
        early.add_addresses({1: Address(relay.endpoint, late.address.life)})
        late.add_addresses({0: early.address})
        send = early.send(1, STREAM, memoryview(b"hello"))
        assert not send.wait(0.5)
        relay.point_at(late.address.endpoint)
        assert send.wait(LONG)


@pytest.mark.slow
def test_a_process_may_be_reached_before_it_knows_of_the_others():
    """It was refused: process 0 waited for the address of a third one, and did not know process 1 yet."""
    with ExitStack() as stack:
        first, second = (Mesh(rank, KEYS, interface="127.0.0.1", patience=QUICK) for rank in range(2))
        stack.callback(first.close)
        stack.callback(second.close)
        first.add_addresses({1: second.address})
        send = first.send(1, STREAM, memoryview(b"hello"))
        assert not send.wait(0.5)
        second.add_addresses({0: first.address})
        assert send.wait(LONG)
        assert send.error is None


def test_connections_that_break_before_a_process_knows_of_the_others_change_nothing():
    """It read the first packets of two connections of one process at once, and that ended all exchange."""
    with Two(acquainted=False) as two:
        send = two.send(b"hello")
        until(lambda: len(two.meshes[1]._early) == 1)
        two.relay.cut()
        until(lambda: len(two.meshes[1]._early) == 2)
        two.acquaint()
        assert send.wait(LONG)
        assert send.error is None


@pytest.mark.slow
@pytest.mark.parametrize("garbage", ["nothing", "http", "zeros", "plain ZeroMQ"])
def test_a_port_that_answers_with_garbage_is_tried_again(garbage):
    """ZeroMQ did not try again after an answer that it did not understand: the wait lasted until its time-out."""
    with Two() as two, socket.create_server(("127.0.0.1", 0)) as wrong:
        two.relay.point_at(f"tcp://127.0.0.1:{wrong.getsockname()[1]}")
        send, receive = two.send(b"are you there?"), two.receive(14)
        with wrong.accept()[0] as stranger:
            stranger.sendall(GARBAGE[garbage])
            until(lambda: "no process with the same keys" in two.meshes[0].describe(1))
        two.relay.point_at(two.meshes[1].address.endpoint)
        assert arrived(receive) == b"are you there?"
        assert send.wait(LONG)


@pytest.mark.slow
def test_a_connection_that_is_reset_at_its_start_says_nothing_about_keys():
    with ExitStack() as stack:
        mesh = Mesh(0, KEYS, interface="127.0.0.1", patience=QUICK)
        stack.callback(mesh.close)
        there = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        mesh.add_addresses({1: Address(f"tcp://127.0.0.1:{there.getsockname()[1]}", bytes(16))})
        mesh.send(1, STREAM, memoryview(b"are you there?"))
        there.settimeout(LONG)
        while "the connection was reset" not in mesh.describe(1):
            # a system may tell of a reset as of a refusal or an end: of one that came while it connected, or wrote
            with there.accept()[0] as connection:
                assert connection.recv(1), "it speaks first"
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # its end is a reset


def test_who_leaves_waits_for_longer_than_a_broken_link_is_noticed_after():
    """The other one had an error after a finished run, if the last packets were lost."""
    usual = Patience()
    assert usual.farewell > 2 * usual.silence


def test_a_damaged_connection_is_replaced_even_if_something_is_sent_before_this_is_known():
    """A byte from process 1 is damaged. ZeroMQ gives the connection up before the thread of process 0 hears of it."""
    with Two() as two, ExitStack() as stack:
        assert two.send(b"before").wait(LONG)
        busy = Event()
        stack.callback(busy.set)
        two.meshes[0]._loop.ask(busy.wait)
        send = two.send(b"after")
        two.relay.damage()
        until(lambda: two.relay.ended)
        busy.set()
        assert send.wait(LONG) and send.error is None
        assert (arrived(two.receive(6)), arrived(two.receive(5))) == (b"before", b"after")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_changed_flags_of_frames_lose_nothing(seed):
    """ZeroMQ drops a part with another flag, or joins two packets; the rest was refused, and the run ended."""
    with Two() as two:
        assert two.send(b"before").wait(LONG)
        two.relay.change_flags(random.Random(seed))
        wanted = [b"before", *(bytes([number]) * (1 + 50 * number) for number in range(40))]
        sends = [two.send(data) for data in wanted[1:]]
        assert [arrived(two.receive(len(data))) for data in wanted] == wanted
        assert all(send.wait(LONG) and send.error is None for send in sends)


@pytest.mark.slow
def test_the_first_packet_of_an_old_connection_may_be_read_last():
    """Then the newer connection counts: it was forgotten, so that its packets stayed without an answer."""
    with Two() as two, ExitStack() as stack:
        lives = (mesh.address.life for mesh in two.meshes)
        hello = Hello(0, 1, 0, 2, *lives)
        (new, _), (old, _) = (stack.enter_context(stranger_at(two, KEYS.public, KEYS.secret)) for _ in range(2))
        new.send(hello.pack())
        assert new.poll(1000 * LONG)
        assert unpack_answer(new.recv()) == 0
        old.send(replace(hello, attempt=1).pack())
        assert not old.poll(500)
        receive = two.receive(5)
        new.send_multipart([Piece(STREAM, 0, 0, 5).pack(0, b"fine?", awaited=True), b"fine?"])
        assert arrived(receive) == b"fine?"
        assert new.poll(1000 * LONG)
        assert unpack_answer(new.recv()) == 1


@pytest.mark.slow
def test_a_process_with_other_keys_gets_nothing_in_and_is_told():
    with Two(keys=(Keys.fresh(), KEYS)) as two:
        send, receive = two.send(b"let me in"), two.receive(9)
        until(lambda: "what answers there is no process with the same keys" in two.meshes[0].describe(1))
        assert not send.ended and not receive[0].ended


def test_the_public_key_alone_opens_nothing():
    events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    with Two() as two, stranger_at(two, *zmq.curve_keypair(), events) as (_, monitor):
        assert monitor.poll(1000 * LONG)
        event = parse_monitor_message(monitor.recv_multipart())
        assert (event["event"], event["value"]) == (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400)


def test_a_process_of_another_life_is_refused():
    """A run is restarted, and one of its old processes still sends."""
    with Two(life=b"another lifetime") as two:
        send = two.send(b"from the past")
        assert send.wait(LONG)
        assert send.error == "process 1 ended the exchange: process 1 of this run does not listen there"


GARBAGE = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "zeros": bytes(1 << 16),
    "noise": os.urandom(1 << 16),
    "plain ZeroMQ": b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL".ljust(64, b"\0")
    + b"\4\x19\5READY\x0bSocket-Type\0\0\0\6DEALER",
    "a huge command": b"\xff\0\0\0\0\0\0\0\1\x7f\3\0CURVE".ljust(64, b"\0")
    + b"\6"
    + b"\x7f"
    + b"\xff" * 7
    + bytes(1000),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_on_the_port_changes_nothing(garbage):
    with Two() as two:
        host, _, port = two.meshes[1].address.endpoint.removeprefix("tcp://").rpartition(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(5)]
        for stranger in strangers:
            with suppress(ConnectionError):  # it may be cut off before it has said all
                stranger.sendall(garbage)
        receive = two.receive(5)
        assert two.send(b"fine?").wait(LONG)
        assert arrived(receive) == b"fine?"
        for stranger in strangers:
            stranger.close()
        receive = two.receive(5)
        assert two.send(b"fine!").wait(LONG)
        assert arrived(receive) == b"fine!"


@pytest.mark.parametrize("parts", [[b"H"], [b"D" * 56, b"x"], [os.urandom(48)], [b"", b"", b""], [b"A" * 16]])
def test_packets_that_are_none_change_nothing_even_with_the_keys(parts):
    with Two() as two, stranger_at(two, KEYS.public, KEYS.secret) as (stranger, _):
        stranger.send_multipart(parts)
        receive = two.receive(5)
        assert two.send(b"fine?").wait(LONG)
        assert arrived(receive) == b"fine?"


def test_a_part_that_is_too_long_ends_its_connection_and_nothing_else():
    with Two() as two, stranger_at(two, KEYS.public, KEYS.secret, zmq.EVENT_DISCONNECTED) as (stranger, monitor):
        stranger.send(bytes(LARGEST_PART + 1))
        assert monitor.poll(1000 * LONG)
        receive = two.receive(5)
        assert two.send(b"fine?").wait(LONG)
        assert arrived(receive) == b"fine?"


def test_a_message_that_is_too_long_fails_its_receive():
    with Two() as two:
        pending, buffer = two.receive(4)
        assert two.send(bytes([255]) * 5).wait(LONG)
        assert pending.wait(LONG)
        assert pending.error == "5 bytes came where 4 at most are expected"
        assert bytes(buffer) == bytes(4)


@pytest.mark.slow
def test_who_leaves_waits_until_the_others_have_all():
    with Two() as two:
        two.relay.hush()
        send, receive = two.send(b"last words"), two.receive(10)
        two.relay.go_on()
        # the thread that sends is late, as on a busy machine
        two.meshes[0]._loop.ask(partial(time.sleep, 0.2))
        late = two.send(b"the last")
        two.meshes[0].close()
        assert send.ended and late.ended
        assert arrived(receive) == b"last words"


@pytest.mark.slow
def test_a_process_that_has_ended_is_told_long_before_the_time_out():
    with ExitStack() as stack:
        first, second = (Mesh(rank, KEYS, interface="127.0.0.1", patience=QUICK) for rank in range(2))
        stack.callback(first.close)
        first.add_addresses({1: second.address})
        second.add_addresses({0: first.address})
        assert first.send(1, STREAM, memoryview(b"are you there?")).wait(LONG)
        receive = first.receive(1, STREAM, memoryview(bytearray(3)))
        second.close()
        assert receive.wait(LONG)
        assert receive.error == "process 1 ended the exchange: it does not listen any more, so it has ended"
        late = first.send(1, STREAM, memoryview(b"hello?"))
        assert late.wait(LONG) and late.error == receive.error


@pytest.mark.slow
def test_a_look_that_cannot_be_made_while_too_many_files_are_open_says_nothing(monkeypatch):
    """Strangers held all connections that a process may have; when another process ended, its own run broke."""
    refused, genuine = [], socket.socket

    def full(*arguments, **named):
        if len(refused) < 2:
            refused.append(arguments)
            raise OSError(errno.EMFILE, "Too many open files")
        return genuine(*arguments, **named)

    with ExitStack() as stack:
        first, second = (Mesh(rank, KEYS, interface="127.0.0.1", patience=QUICK) for rank in range(2))
        stack.callback(first.close)
        first.add_addresses({1: second.address})
        second.add_addresses({0: first.address})
        assert first.send(1, STREAM, memoryview(b"are you there?")).wait(LONG)
        receive = first.receive(1, STREAM, memoryview(bytearray(3)))
        second.close()
        monkeypatch.setattr(socket, "socket", full)
        assert receive.wait(LONG) and len(refused) == 2
        assert receive.error == "process 1 ended the exchange: it does not listen any more, so it has ended"


def test_nothing_listens_beyond_the_interface():
    with Two() as two:
        assert {mesh.address.endpoint.rpartition(":")[0] for mesh in two.meshes} == {"tcp://127.0.0.1"}


def test_nothing_waits_for_a_thread_that_has_ended():
    """A wait that began after a failure in the thread lasted until its time-out, and so the failure was not seen."""

    def fail():
        raise ValueError("a mistake")

    with Two() as two:
        before = two.receive(1)[0]
        two.meshes[1]._loop.ask(fail)
        among = two.receive(1)[0]
        two.meshes[1]._loop.join()
        after = two.receive(1)[0], two.meshes[1].send(0, STREAM, memoryview(b"hello"))
        for pending in (before, among, *after):
            assert pending.wait(LONG)
            assert "ValueError: a mistake" in pending.error
