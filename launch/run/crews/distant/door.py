"""The socket of the meeting place of replicas on several hosts: one address, and nobody without the keys gets in.

ZeroMQ lets no byte of a stranger through: it ends a connection that does not prove the keys, and one with a packet that
is too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq
import zmq.asyncio

from thinwire.launch.run.crews.distant.hall import Hall
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.zeromq.connections import Patience, bounded
from thinwire.pipeline.zeromq.keys import Keys

_EVERY = 0.25
"""Seconds from one look around to the next."""
_LAST_WORDS = 1000
"""Milliseconds for the last acknowledgements."""
_ZAP = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks who may connect (its RFC 27)."""

MakeHall = Callable[[Callable[[bytes, list[bytes]], None]], Hall]
"""Makes the hall, given what sends packets."""


async def serve(address: str, keys: Keys, make_hall: MakeHall, opened: Callable[[str], None]) -> None:
    """Listen until all replicas have ended. `opened` is told the address.

    Raises:
        OptionsError: this host does not have the address, or another program listens there.
    """
    context = zmq.asyncio.Context()
    asked, door = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
    asked.bind(_ZAP)  # before the door: it admits nobody while there is nobody to ask
    bounded(door)
    Patience().watch(door)
    keys.serve(door)
    try:
        door.bind(f"tcp://{address}")
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        raise OptionsError(f"--listen must be a free ADDRESS:PORT of this host, got {address}: {error}") from error
    endpoint = door.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    opened(endpoint.rstrip(b"\0").decode().removeprefix("tcp://"))
    hall = make_hall(lambda route, parts: _send(door, route, parts))
    tasks = [asyncio.create_task(_admit(asked, keys)), asyncio.create_task(_listen(door, hall))]
    try:
        while not hall.is_over:
            for task in tasks:
                if task.done():
                    task.result()
            hall.look()
            await asyncio.sleep(_EVERY)
        hall.look()
        hall.tell_end()
    finally:
        for task in tasks:
            task.cancel()
        context.destroy(linger=_LAST_WORDS)


def _send(door: zmq.asyncio.Socket, route: bytes, parts: list[bytes]) -> None:
    """Send at once: the socket has no limit, and drops what is for a connection that is gone."""
    door.send_multipart([route, *parts])


async def _admit(asked: zmq.asyncio.Socket, keys: Keys) -> None:
    """Answer ZeroMQ's question whether a process may connect."""
    while True:
        asking, delimiter, version, request, _, _, _, mechanism, *credentials = await asked.recv_multipart()
        known = keys.admits(mechanism, b"".join(credentials))
        code, text = (b"200", b"") if known else (b"400", b"other keys")
        await asked.send_multipart([asking, delimiter, version, request, code, text, b"", b""])


async def _listen(door: zmq.asyncio.Socket, hall: Hall) -> None:
    while True:
        route, *parts = await door.recv_multipart()
        hall.take(route, parts)
