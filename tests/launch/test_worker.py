"""What a stage process says where it cannot join the others."""

import socket
from types import SimpleNamespace

import pytest

from thinwire.launch.run.worker import join
from thinwire.pipeline.errors import MismatchError
from thinwire.pipeline.options import WireOptions


def prepared(num_processes):
    pipeline = SimpleNamespace(num_processes=num_processes)
    return SimpleNamespace(recipe=SimpleNamespace(pipeline=pipeline, wire=WireOptions(timeout=10)))


def test_a_port_in_use_is_named_with_what_to_set(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        given = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in given.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(MismatchError) as caught:
            join(prepared(2), rank=0)
    assert str(caught.value) == (
        f"the port where all processes meet must be free, but another program uses {port}; set MASTER_PORT to another "
        "one (torchrun: --master-port), the same on every machine"
    )
