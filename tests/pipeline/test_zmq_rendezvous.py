"""Addresses that the rendezvous store gives, and what one does that no socket can connect to."""

from threading import Thread

import pytest

pytest.importorskip("zmq", reason="needs pyzmq")

from support.two_meshes import KEYS, LONG, QUICK, STREAM
from thinwire.pipeline.errors import WireError
from thinwire.pipeline.processes import posts
from thinwire.pipeline.processes.zeromq.group import _read
from thinwire.pipeline.processes.zeromq.mesh import Address, Mesh


@pytest.mark.parametrize(
    "endpoint",
    [
        *("tcp://127.0.0.1:65536", "tcp://127.0.0.1:0", "tcp://256.0.0.1:80", "tcp://127.0.0.\u0661:80", "ipc://a"),
        *("tcp://fd00::1:80", "tcp://[fd00::1]", "tcp://[fe80::1%eth0]:80", "tcp://[127.0.0.1]:80"),
    ],
)
def test_an_address_that_no_socket_can_connect_to_is_refused(endpoint):
    """The store gave one; then the process could exchange nothing with anybody, and did not end."""
    said = {"endpoint": endpoint, "life": "00" * 16, "keys": KEYS.fingerprint}
    with pytest.raises(WireError, match="process 3 must send its address"):
        _read(posts.written(said).encode(), 3, KEYS)
    for good in ("tcp://127.0.0.1:65535", "tcp://[fd00::1]:80"):
        said["endpoint"] = good
        assert _read(posts.written(said).encode(), 3, KEYS).endpoint == good


def test_a_process_leaves_although_a_failure_has_left_a_socket_open():
    mesh = Mesh(0, KEYS, interface="127.0.0.1", patience=QUICK)
    mesh.add_addresses({1: Address("tcp://127.0.0.\u0661:80", bytes(16))})
    send = mesh.send(1, STREAM, memoryview(b"hello"))
    assert send.wait(LONG) and "Invalid argument" in send.error
    leaves = Thread(target=mesh.close, daemon=True)
    leaves.start()
    leaves.join(LONG)
    assert not leaves.is_alive()
