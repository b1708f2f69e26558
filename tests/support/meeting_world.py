"""The meeting place of replicas on several hosts without a socket, and a clock that a test moves."""

import asyncio
import json

from thinwire.launch.run.crews.remote.server import MeetingServer, Size
from thinwire.launch.run.crews.remote.stream import (
    ACK,
    HELLO,
    LAUNCHER,
    VERSION,
    MessageStream,
    pack,
    pack_words,
    unpack,
)

LARGEST = 100
"""Bytes that a message may carry there."""


class World:
    """A server without a socket, with what it sent over each connection; `now` is its clock."""

    def __init__(self, processes):
        self.now, self.sent, self.told = 0.0, {}, []
        size = Size(replicas=2, processes=processes, timeout=10.0, silence=6.0, largest=LARGEST)
        self.server = MeetingServer(size, {}, self._send, self.told.append, lambda: self.now)

    def _send(self, route, parts):
        self.sent.setdefault(route, []).append(unpack(parts))

    def hello(self, route, replica, session, server=None, expected=0, agreed=()):
        words = {"replica": replica, "session": session, "server": server, "expected": expected}
        words["agreed"] = dict(agreed)
        self.server.take(route, pack_words(HELLO, VERSION, **words))
        kind, number, data = self.sent[route][-1]
        return kind, number, json.loads(data)

    def enter(self, route, replica, session="session"):
        """Let a replica come over a connection: the proxy's end of its streams, and the identifier of the server."""
        _, _, welcome = self.hello(route, replica, session)
        stream = MessageStream()
        stream.begin(lambda *packet: self.server.take(route, pack(*packet)), 0)
        stream.write(LAUNCHER, {"kind": "comes", "replica": replica})
        return stream, welcome["server"]

    async def wait(self, seconds, *routes):
        """Let time pass; what comes over these connections is heard all the time."""
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            for route in routes:
                self.server.take(route, pack(ACK, 0))
            self.server.look()
            await asyncio.sleep(0)


def in_world(scene, processes=1):
    """Run a scene with a server of its own."""

    async def played():
        await scene(World(processes))

    asyncio.run(played())
