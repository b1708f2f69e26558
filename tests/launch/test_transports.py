"""`wire.transport: zmq` as a user starts it: the same digest as simulated, keys handed over, strangers refused."""

import os
import socket

import pytest

pytest.importorskip("zmq", reason="needs pyzmq")

from support import tiny_run
from support.commands import THINWIRE, TORCHRUN, TRAIN, completed, free_port, started
from support.listening import listening, needs_ss
from support.run_files import digest
from thinwire.launch import cli

pytestmark = pytest.mark.processes

ZMQ = ["--wire.transport", "zmq", "--wire.timeout", "120"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("runs")
    tiny_run.write_recipe(made)
    return made


def simulated(folder, monkeypatch, *options):
    """The digest of the same recipe, simulated."""
    monkeypatch.chdir(folder)
    assert cli.main(["simulate", "tiny.yaml", "--output", "simulated", "--overwrite", *options]) == 0
    return digest(folder / "simulated")


@needs_ss
def test_garbage_on_every_port_of_a_run_changes_nothing(folder, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    long = ["--training.steps", "100"]
    arguments = [*THINWIRE, "train", "tiny.yaml", "--output", "visited", "--overwrite", *long, *ZMQ]
    metrics = folder / "visited/metrics.jsonl"
    with started(arguments, folder) as command:
        command.wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
        places = listening(set(command.stage_processes().values()))
        assert {address for address, _ in places} == {"127.0.0.1"}
        assert len(places) == 2  # one each, and none of gloo's
        strangers = [socket.create_connection(place) for place in places for _ in range(10)]
        for stranger in strangers:
            stranger.sendall(os.urandom(4096))
        assert command.wait() == 0, command.stderr
        for stranger in strangers:
            stranger.close()
    assert digest(folder / "visited") == simulated(folder, monkeypatch, *long)


def test_torchrun_takes_keys_from_a_file(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert cli.main(["keys", "run.keys"]) == 0
    assert "copy it to every machine" in capsys.readouterr().out
    arguments = [*TORCHRUN, "--nproc-per-node", "2", "--master-port", str(free_port()), *TRAIN, "tiny.yaml", *ZMQ]
    command = completed([*arguments, "--output", "torchrun", "--overwrite", "--wire.keys", "run.keys"], folder)
    assert command.status == 0, command.stderr
    assert digest(folder / "torchrun") == simulated(folder, monkeypatch)
