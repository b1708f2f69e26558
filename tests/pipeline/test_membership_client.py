"""A process that listens nowhere and a membership server, with a relay between them: what arrives, and who gives up."""

import os
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

pytest.importorskip("zmq", reason="needs pyzmq")

from support.relay import Relay
from support.two_meshes import KEYS, LONG, until
from thinwire.pipeline.errors import PeerError
from thinwire.pipeline.processes.zeromq.connections import Patience, Standing
from thinwire.pipeline.processes.zeromq.mesh import Mesh, Taking
from thinwire.pipeline.replicas.membership import client as client_room
from thinwire.pipeline.replicas.membership.client import PIECE_BYTES, SERVER, Client
from thinwire.pipeline.replicas.membership.messages import TEXT, pack

KINDS = {"deliver": {"text": TEXT}}
DATA = os.urandom(20 * PIECE_BYTES + 7)


class Echo:
    """A server that answers each message with itself, and tells who failed."""

    def __init__(self):
        self.peers, self.failed, self.answers = set(), [], True
        taking = Taking(self._take, lambda peer, reason: self.failed.append(reason), 1 << 22)
        patience = Patience(heartbeat=0.1, silence=0.5, farewell=0)
        self.mesh = Mesh(SERVER, KEYS, interface="127.0.0.1", patience=patience, piece_bytes=PIECE_BYTES, taking=taking)

    def _take(self, peer, data):
        self.peers.add(peer)
        if self.answers:
            self.mesh.give(peer, data)


@contextmanager
def connected(heartbeat=0.5, timeout=float(LONG)):
    """A server that echoes, the relay before it, and a client."""
    server, told = Echo(), []
    relay = Relay(server.mesh.address.endpoint)
    place = relay.endpoint.removeprefix("tcp://")
    client = Client(place, KEYS, heartbeat, timeout, KINDS, report=told.append)
    try:
        yield server, relay, client, told
    finally:
        client._mesh.close()
        server.mesh.close()
        relay.close()


def echo(client, text, *blobs):
    words, arrived = client.ask({"kind": "deliver", "text": text}, blobs)
    assert (words["text"], arrived) == (text, list(blobs))


@pytest.mark.slow
def test_connections_that_break_lose_nothing_in_either_direction():
    with connected() as (server, relay, client, _):
        echo(client, "first", DATA)
        over = threading.Event()

        def disturb():
            while not over.wait(0.03):
                relay.cut()

        disturbing = threading.Thread(target=disturb)
        disturbing.start()
        while relay.accepted < 4:
            echo(client, str(relay.accepted), DATA, b"")
        over.set()
        disturbing.join()
        assert len(server.peers) == 1 and not server.failed, "it is the same process all the time"


@pytest.mark.slow
def test_a_process_that_was_forgotten_is_refused(monkeypatch):
    monkeypatch.setattr(client_room, "_GRACE", 0.0)
    with connected() as (server, _, client, _):
        echo(client, "first")
        [peer] = server.peers
        server.mesh.ask(lambda: server.mesh.forget(peer))
        with pytest.raises(PeerError, match="starts again: it was started again, or received nothing from"):
            client.ask({"kind": "deliver", "text": "second"})
        assert not client.ending.lasting


@pytest.mark.slow
def test_what_the_server_acknowledges_must_have_been_sent():
    with connected() as (server, _, client, _):
        echo(client, "first")
        monkey = client._mesh.connection(SERVER)
        client._mesh.ask(lambda: setattr(monkey._inflow, "expected", 99))
        until(lambda: server.failed)
        assert server.failed[0] == "it acknowledges packet 99, which was never sent"


def test_time_in_which_a_process_had_no_turn_does_not_count():
    """A replica that was stopped for longer than `wire.timeout` gave up when it went on, before it read its answer."""
    with connected(timeout=1.5) as (_, _, client, _):
        echo(client, "first")

        def stopped():
            client._mesh.give(SERVER, pack({"kind": "deliver", "text": "second"}, []))
            time.sleep(2)
            client._look()

        client._mesh.ask(stopped)
        words, _ = client._answers.get(timeout=LONG)
        assert words["text"] == "second" and client.ending is None


def test_bytes_that_are_no_message_end_the_client():
    with connected() as (server, _, client, _):
        echo(client, "first")
        [peer] = server.peers
        server.mesh.ask(lambda: server.mesh.give(peer, b"?"))
        until(lambda: client.ending)
        assert client.ending.lasting and "sent an invalid message" in client.ending.text


@pytest.mark.slow
def test_a_client_that_leaves_waits_while_the_server_takes_its_last_message(monkeypatch):
    """Over a slow link it was gone before the server had its weights, and was called lost."""
    monkeypatch.setattr(client_room, "_LAST", 1.0)
    with connected(heartbeat=60.0) as (server, relay, client, _):
        echo(client, "first")
        relay._delay, server.answers = 0.1, False
        client.send({"kind": "deliver", "text": "last"}, [DATA * 4])
        said = []
        client.close(said.append)
        assert client.left == 0
        assert len(said) == 1 and "the membership server takes the last " in said[0]


@pytest.mark.slow
def test_a_link_that_is_too_slow_is_told_after_the_time_out(monkeypatch):
    """Each call got an answer, so the replica called again for ever."""
    with connected(heartbeat=0.3, timeout=1.0) as (_, _, client, _):
        echo(client, "first")
        start = time.monotonic()

        def connection(peer):
            """Just greeted again, with a message of which no piece arrives."""
            now = time.monotonic()
            return SimpleNamespace(
                state=Standing.READY, left=1, since=now, moved=start, greeted=True, beat=lambda: None
            )

        monkeypatch.setattr(client._mesh, "connection", connection)
        until(lambda: client.ending)
        assert client.ending.lasting
        assert "for 1 s (wire.timeout): the link must carry 16 KiB within wire.heartbeat" in client.ending.text


@pytest.mark.slow
def test_a_server_that_is_silent_is_told_and_waited_for():
    with connected(heartbeat=0.3) as (_, relay, client, told):
        echo(client, "first")
        relay.hush()
        until(lambda: told)
        assert told[0].startswith("nothing comes from the membership server at 127.0.0.1:")
        relay.go_on()
        echo(client, "second")
