"""A meeting place of replicas on several hosts, and the launchers that call it, over ZeroMQ in one process."""

import asyncio
import json
import os
import socket
from contextlib import asynccontextmanager

from thinwire.launch.run.crews.remote.listener import serve
from thinwire.launch.run.crews.remote.proxy import lead
from thinwire.launch.run.crews.remote.server import MeetingServer, Size
from thinwire.launch.run.crews.remote.settings import ProxySettings
from thinwire.launch.run.crews.remote.stream import PIECE_BYTES
from thinwire.pipeline.replicas.membership.attendance import Attendance
from thinwire.pipeline.zeromq.keys import Keys

TIMEOUT = 60.0
LONG = os.urandom(3 * PIECE_BYTES + 1)


class Meeting:
    """A meeting place of two replicas with a process each, at a free port."""

    def __init__(self, keys, address="127.0.0.1:*"):
        self.told, self._opened = [], asyncio.get_running_loop().create_future()
        size = Size(replicas=2, processes=1, timeout=TIMEOUT, silence=TIMEOUT, largest=1 << 20)
        agreed = {"model.name": '"gpt2"'}
        self.serving = asyncio.create_task(
            serve(
                address, keys, lambda send: MeetingServer(size, agreed, send, self.told.append), self._opened.set_result
            )
        )

    async def address(self):
        return await self._opened

    async def close(self):
        self.serving.cancel()
        await asyncio.wait([self.serving])


class Host:
    """A launcher and its stage process, with their proxy."""

    def __init__(self, settings):
        self.replica = settings.replica
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.leading = asyncio.create_task(lead(theirs, settings))
        ours, theirs = socket.socketpair()
        self._say({"comes": self.replica}, theirs)
        theirs.close()
        self._attendance = Attendance(ours, self.replica)

    async def begin(self, held=0):
        return await asyncio.to_thread(self._attendance.begin, held, "x")

    async def exchange(self, step, frame, last=False):
        return await asyncio.to_thread(self._attendance.exchange, step, 4, [frame], last=last)

    def gives(self, state, step=1):
        self._attendance.applied(step, "x", {}, state, last=True)

    async def leave(self):
        self._say({"loses": self.replica, "for_good": True})
        self._control.close()
        return await self.leading

    def _say(self, words, *given):
        socket.send_fds(self._control, [json.dumps(words).encode()], [each.fileno() for each in given])


@asynccontextmanager
async def met(folder):
    """A meeting place, and the settings of the proxy of replica 0."""
    Keys.fresh().write(folder / "keys")
    place = Meeting(Keys.read(folder / "keys"))
    agreed = {"model.name": '"gpt2"', "the samples of training": "abc"}
    yield place, ProxySettings(await place.address(), str(folder / "keys"), 0, TIMEOUT, TIMEOUT, agreed)
    await place.close()
