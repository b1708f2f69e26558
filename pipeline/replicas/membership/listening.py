"""The membership server on a mesh, in whose thread it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from thinwire.pipeline.processes.zeromq.connections import Patience
from thinwire.pipeline.processes.zeromq.keys import Keys
from thinwire.pipeline.processes.zeromq.mesh import Mesh, Taking
from thinwire.pipeline.replicas.membership.client import PIECE_BYTES, SERVER
from thinwire.pipeline.replicas.membership.server import Server, Size

_EVERY = 0.25
"""Seconds from one look around to the next."""


def listen(
    interface: str,
    port: int | str,
    keys: Keys,
    size: Size,
    agreed: Mapping[str, str] | None,
    largest: int,
    report: Callable[[str], None],
) -> tuple[Server, Mesh]:
    """A membership server that listens at one address, and its mesh; nobody without the keys gets a byte through.

    Args: as for Server; `port` * is any free one, and `largest` is the most bytes of a message.

    Raises:
        zmq.ZMQError: this host does not have the address, or another program listens there.
    """
    server = Server(size, agreed, report)
    patience, taking = Patience(farewell=0.0), Taking(server.take, server.turn_away, largest)
    mesh = Mesh(SERVER, keys, interface=interface, port=port, patience=patience, piece_bytes=PIECE_BYTES, taking=taking)

    def look() -> None:
        server.look()
        mesh.later(_EVERY, look)

    server.network = mesh
    mesh.ask(look)
    return server, mesh
