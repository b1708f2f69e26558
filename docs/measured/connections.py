"""Measure `wire.connections` over a long path: a relay that holds up each connection.

    PYTHONPATH=tests python docs/measured/connections.py

The relay of the tests reads 64 KiB of a connection, waits, and passes them on. So a connection carries 64 KiB each
20 ms at most, as over a path whose round trip its window does not fill. docs/how-to/security.md has the numbers.
"""

import statistics
import time

from support.relay import Relay
from thinwire.pipeline.processes.zeromq.keys import Keys
from thinwire.pipeline.processes.zeromq.mesh import Address, Mesh
from thinwire.pipeline.processes.zeromq.packets import Stream

DELAY, NBYTES, TURNS = 0.02, 8 << 20, 5


def seconds(connections: int) -> float:
    """Median seconds of a message of 8 MiB."""
    keys, stream, taken = Keys.fresh(), Stream(1, 0), []
    first, second = (Mesh(rank, keys, interface="127.0.0.1", connections=connections) for rank in range(2))
    relay = Relay(second.address.endpoint, DELAY)
    first.add_addresses({1: Address(relay.endpoint, second.address.life)})
    second.add_addresses({0: first.address})
    for _ in range(TURNS + 1):
        pending = second.receive(0, stream, memoryview(bytearray(NBYTES)))
        started = time.perf_counter()
        first.send(1, stream, memoryview(bytes(NBYTES)))
        assert pending.wait(600)
        taken.append(time.perf_counter() - started)
    for mesh in (first, second):
        mesh.close()
    relay.close()
    return statistics.median(taken[1:])  # the first opens the connections


def main() -> None:
    """Measure 1, 2, 4 and 8 connections."""
    print("| wire.connections | Mbit/s |\n|---|---|")
    for connections in (1, 2, 4, 8):
        print(f"| {connections} | {8e-6 * NBYTES / seconds(connections):.3g} |", flush=True)


if __name__ == "__main__":
    main()
