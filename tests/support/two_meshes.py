"""Two meshes on loopback with a relay between them."""

import time
from contextlib import contextmanager

import zmq

from support.relay import Relay
from thinwire.pipeline.processes.zeromq.connections import Patience
from thinwire.pipeline.processes.zeromq.keys import Keys
from thinwire.pipeline.processes.zeromq.mesh import Address, Mesh
from thinwire.pipeline.processes.zeromq.packets import Stream

STREAM = Stream(1, 0)
QUICK = Patience(heartbeat=0.1, silence=0.5, retry=0.02, gone=0.5, farewell=2)
KEYS = Keys.fresh()
LONG = 60
"""Seconds after which a test gives up."""


class Two:
    """Processes 0 and 1; all that 0 sends to 1 goes through `relay`."""

    def __init__(self, keys=(KEYS, KEYS), connections=1, life=None, acquainted=True):
        self.meshes = [
            Mesh(rank, keys[rank], interface="127.0.0.1", connections=connections, patience=QUICK) for rank in range(2)
        ]
        second = self.meshes[1].address
        self.relay = Relay(second.endpoint)
        self.meshes[0].add_addresses({1: Address(self.relay.endpoint, life or second.life)})
        if acquainted:
            self.acquaint()

    def acquaint(self):
        self.meshes[1].add_addresses({0: self.meshes[0].address})

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for mesh in self.meshes:
            mesh.close()
        self.relay.close()

    def send(self, data, stream=STREAM):
        return self.meshes[0].send(1, stream, memoryview(data))

    def receive(self, nbytes, stream=STREAM):
        buffer = bytearray(nbytes)
        return self.meshes[1].receive(0, stream, memoryview(buffer)), buffer


def until(condition):
    """Wait for something that happens in another thread."""
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def arrived(receive):
    pending, buffer = receive
    assert pending.wait(LONG), "nothing came"
    assert pending.error is None, pending.error
    return bytes(buffer)


@contextmanager
def stranger_at(two, public, secret, events=0):
    """A plain socket of ZeroMQ that knows the public key and connects to process 1, and what watches it."""
    context = zmq.Context()
    try:
        stranger = context.socket(zmq.DEALER)
        stranger.curve_serverkey = KEYS.public
        stranger.curve_publickey, stranger.curve_secretkey = public, secret
        monitor = stranger.get_monitor_socket(events)
        stranger.connect(two.meshes[1].address.endpoint)
        yield stranger, monitor
        stranger.disable_monitor()
    finally:
        context.destroy(linger=0)
