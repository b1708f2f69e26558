"""Hosts that have IPv6 addresses alone, as two homes that reach each other without a forwarded port."""

import subprocess
from contextlib import ExitStack

import pytest

pytest.importorskip("zmq", reason="needs pyzmq")

from support.commands import node_of_two, started
from support.hosts import WIRE, hosts
from support.recipe_runs import simulate
from support.run_files import digest
from support.tiny_run import write_recipe
from thinwire.launch import cli

pytestmark = [pytest.mark.namespaces, pytest.mark.usefixtures("can_make_hosts")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["keys", "run.keys"]) == 0
    return tmp_path


@pytest.fixture
def pair():
    with hosts(2) as made:
        for host in made:
            for words in (f"addr flush dev {WIRE}", f"addr add {ipv6(host)}/64 dev {WIRE} nodad"):
                subprocess.run(["ip", "-n", host.name, *words.split()], check=True)
        yield made


def ipv6(host):
    return f"fd00::{host.index + 1}"


def test_stages_train_over_zmq_and_hear_each_other(folder, pair):
    with ExitStack() as commands:
        nodes = []
        for rank, host in enumerate(pair):
            options = ["--wire.transport", "zmq", "--wire.keys", "run.keys", "--output", "run"]
            words = node_of_two(rank, "tiny.yaml", *options, address=ipv6(pair[0]))
            command = started(host.command(words), folder, GLOO_SOCKET_IFNAME=WIRE)
            nodes.append(commands.enter_context(command))
        assert [node.wait() for node in nodes] == [0, 0], nodes[0].stderr + nodes[1].stderr
    assert digest(folder / "run") == digest(simulate("tiny.yaml", folder / "simulated"))
