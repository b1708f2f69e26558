"""The socket of the meeting place of replicas on several hosts: one address, and nobody without the keys gets in.

ZeroMQ lets no byte of a stranger through: it ends a connection that does not prove the keys, and one with a packet that
is too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq
import zmq.asyncio

from thinwire.launch.run.crews.remote.server import MeetingServer
from thinwire.launch.shared.open_files import allow_many_files
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.zeromq.connections import Patience, bounded
from thinwire.pipeline.zeromq.keys import Keys

_EVERY = 0.25
"""Seconds from one look around to the next."""
_LAST_WORDS = 1000
"""Milliseconds for the last acknowledgements."""
_ZAP = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks who may connect (its RFC 27)."""

MakeServer = Callable[[Callable[[bytes, list[bytes]], None]], MeetingServer]
"""Makes the server, given what sends packets."""


async def serve(
    address: str,
    keys: Keys,
    make_server: MakeServer,
    opened: Callable[[str], None],
    is_stopped: Callable[[], object] = lambda: False,
) -> bool:
    """Listen until all replicas have ended, or until it is stopped; whether they have ended.

    Args:
        address: where to listen.
        keys: those of the run.
        make_server: makes the server.
        opened: is told the address.
        is_stopped: whether it is to stop.

    Raises:
        OptionsError: this host does not have the address, or another program listens there.
    """
    allow_many_files()
    context = zmq.asyncio.Context()
    zap, listener = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
    zap.bind(_ZAP)  # before the listener: it admits nobody while there is nobody to ask
    bounded(listener)
    Patience().watch(listener)
    keys.serve(listener)
    try:
        listener.ipv6 = "[" in address
        listener.bind(f"tcp://{address}")
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        raise OptionsError(f"--listen must be a free ADDRESS:PORT of this host, got {address}: {error}") from error
    endpoint = listener.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    opened(endpoint.rstrip(b"\0").decode().removeprefix("tcp://"))
    server = make_server(lambda route, parts: _send(listener, route, parts))
    tasks = [asyncio.create_task(_admit(zap, keys)), asyncio.create_task(_listen(listener, server))]
    try:
        while not (over := server.is_over) and not is_stopped():
            for task in tasks:
                if task.done():
                    task.result()
            server.look()
            await asyncio.sleep(_EVERY)
        server.look()
        if over:
            server.tell_end()
        return over
    finally:
        for task in tasks:
            task.cancel()
        context.destroy(linger=_LAST_WORDS)


def _send(listener: zmq.asyncio.Socket, route: bytes, parts: list[bytes]) -> None:
    """Send at once: the socket has no limit, and drops what is for a connection that is gone."""
    listener.send_multipart([route, *parts])


async def _admit(zap: zmq.asyncio.Socket, keys: Keys) -> None:
    """Answer ZeroMQ's question whether a process may connect."""
    while True:
        asking, delimiter, version, request, _, _, _, mechanism, *credentials = await zap.recv_multipart()
        known = keys.admits(mechanism, b"".join(credentials))
        code, text = (b"200", b"") if known else (b"400", b"other keys")
        await zap.send_multipart([asking, delimiter, version, request, code, text, b"", b""])


async def _listen(listener: zmq.asyncio.Socket, server: MeetingServer) -> None:
    while True:
        route, *parts = await listener.recv_multipart()
        server.take(route, parts)
