"""The way of a replica to a meeting place over slow links."""

import asyncio
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("zmq", reason="needs pyzmq")

from support.meeting_host import LONG, TIMEOUT, Host
from thinwire.launch.run.crews.remote import proxy
from thinwire.launch.run.crews.remote.listener import serve
from thinwire.launch.run.crews.remote.settings import ProxySettings
from thinwire.launch.run.crews.remote.stream import ACK, HELLO, PIECE, WELCOME, pack, pack_words, unpack
from thinwire.pipeline.zeromq.keys import Keys


class Lecturer:
    """A server that sends a message in three pieces and nothing else; it ends when the proxy says that it has all."""

    def __init__(self, send):
        self._send, self.is_over = send, False

    def take(self, route, parts):
        kind, number, _ = unpack(parts)
        if kind == HELLO:
            self._send(route, pack_words(WELCOME, 0, server="this one", noted=None))
            for piece in range(3):
                self._send(route, pack(PIECE, piece, b"abc"))
        self.is_over = (kind, number) == (ACK, 3)

    def look(self):
        pass

    def tell_end(self):
        pass


def test_a_replica_is_heard_while_a_long_message_arrives(tmp_path, monkeypatch):
    """Over a slow link it was lost, because a proxy answered the heartbeats behind the message only."""
    monkeypatch.setattr(proxy, "_FAREWELL", 0.1)  # nobody is there to take the last words

    async def scene():
        Keys.fresh().write(tmp_path / "keys")
        opened = asyncio.get_running_loop().create_future()
        keys = Keys.read(tmp_path / "keys")
        serving = asyncio.create_task(serve("127.0.0.1:*", keys, Lecturer, opened.set_result))
        host = Host(ProxySettings(await opened, str(tmp_path / "keys"), 0, TIMEOUT, TIMEOUT, {}))
        await asyncio.wait_for(serving, TIMEOUT)
        await host.leave()

    asyncio.run(scene())


class SlowReader(Lecturer):
    """A server that takes a piece every time it looks around."""

    def __init__(self, send):
        super().__init__(send)
        self.taken, self.came, self._route = 0, 0, b""

    def take(self, route, parts):
        kind, number, _ = unpack(parts)
        if kind == HELLO:
            self._send(route, pack_words(WELCOME, 0, server="this one", noted=None))
        elif kind == PIECE:
            self.came, self._route = max(self.came, number + 1), route

    def look(self):
        if self.taken < self.came:
            self.taken += 1
            self._send(self._route, pack(ACK, self.taken))


def test_a_replica_that_has_ended_waits_while_its_last_words_arrive(tmp_path, monkeypatch):
    """Over a slow link it was gone before the meeting place had its weights, and was called lost."""
    monkeypatch.setattr(proxy, "_FAREWELL", 2.0)

    async def scene():
        Keys.fresh().write(tmp_path / "keys")
        opened, servers = asyncio.get_running_loop().create_future(), []

        def make(send):
            servers.append(SlowReader(send))
            return servers[0]

        serving = asyncio.create_task(serve("127.0.0.1:*", Keys.read(tmp_path / "keys"), make, opened.set_result))
        host = Host(ProxySettings(await opened, str(tmp_path / "keys"), 0, TIMEOUT, TIMEOUT, {}))
        host.gives(LONG)
        while servers[0].came < 10:
            await asyncio.sleep(0.01)
        assert await host.leave() is None
        assert servers[0].taken == servers[0].came > 10, "and what the launcher says at the end"
        serving.cancel()
        await asyncio.wait([serving])

    asyncio.run(scene())


class Greeter(Lecturer):
    """A server behind a link that is too slow for a piece: a welcome comes through, and nothing else."""

    def take(self, route, parts):
        if unpack(parts)[0] == HELLO:
            self._send(route, pack_words(WELCOME, 0, server="this one", noted=None))


def test_a_link_that_is_too_slow_is_told_after_the_time_out(tmp_path, monkeypatch):
    """Each call got a welcome, so the replica called again for ever."""
    welcomes = []  # no second passes before the first of them, however long a busy machine takes for it
    monkeypatch.setattr(proxy, "tell", lambda text: welcomes.append(time.monotonic()))
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() - welcomes[0] if welcomes else 0.0)
    monkeypatch.setattr(proxy, "time", clock)

    async def scene():
        Keys.fresh().write(tmp_path / "keys")
        opened = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve("127.0.0.1:*", Keys.read(tmp_path / "keys"), Greeter, opened.set_result))
        host = Host(ProxySettings(await opened, str(tmp_path / "keys"), 0, 0.2, 1.0, {}))
        ending = await asyncio.wait_for(host.leading, TIMEOUT)
        assert ending.lasting
        assert "for 1 s (wire.timeout): the link must carry 16 KiB within wire.heartbeat, which is 0.2 s" in ending.text
        serving.cancel()
        await asyncio.wait([serving])

    asyncio.run(scene())
