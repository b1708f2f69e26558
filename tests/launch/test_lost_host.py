"""A host that dies, and comes back under another address: the run goes on from its checkpoint."""

import os
import signal
import subprocess
from contextlib import ExitStack, suppress

import pytest

from support.commands import node_of_two, started
from support.hosts import WIRE, hosts, processes_in
from support.run_files import digest
from support.tiny_run import write_recipe
from thinwire.launch import cli
from thinwire.launch.results.log_file import read_lines

pytestmark = [pytest.mark.namespaces, pytest.mark.usefixtures("can_make_hosts")]

STEPS = 60
OPTIONS = [
    "--wire.heartbeat",
    3,
    "--training.steps",
    STEPS,
    "--compression.activations",
    "aqsgd(q(3))",
    "--optimizer.schedule",
    "constant",
]
OTHER_ADDRESS = "10.0.0.77"


def ip(host, *words):
    subprocess.run(["ip", "-n", host.name, *words], check=True)


def die(host):
    """Nobody hears a word of it: the link is gone before its processes are."""
    ip(host, "link", "set", WIRE, "down")
    for pid in processes_in(host):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def come_back(host):
    ip(host, "addr", "flush", "dev", WIRE)
    ip(host, "addr", "add", f"{OTHER_ADDRESS}/24", "dev", WIRE)
    ip(host, "link", "set", WIRE, "up")


def test_a_host_that_dies_may_come_back_under_another_address(tmp_path, monkeypatch):
    write_recipe(tmp_path)
    with hosts(2) as made, ExitStack() as commands:

        def node(rank, restarts=0):
            options = ["tiny.yaml", *OPTIONS, "--checkpoint.every", "10 steps", "--output", "run"]
            words = node_of_two(rank, *options, address=made[0].address, restarts=restarts)
            command = made[rank].command(words)
            return commands.enter_context(started(command, tmp_path, GLOO_SOCKET_IFNAME=WIRE))

        lives, dies = node(0, restarts=1), node(1)
        dies.wait_until(lambda: list((tmp_path / "run").glob("checkpoints/step-*/manifest.json")))
        die(made[1])
        lives.wait_until(lambda: "stage 0 lost a peer: stage 1 sent no heartbeat" in lives.stderr)
        come_back(made[1])
        again = node(1)
        assert (lives.wait(), again.wait()) == (0, 0), lives.stderr + again.stderr
    assert "goes on from the checkpoint of step" in again.stdout
    monkeypatch.chdir(tmp_path)
    assert cli.main(["simulate", "tiny.yaml", *map(str, OPTIONS), "--output", "whole"]) == 0
    assert digest(tmp_path / "run") == digest(tmp_path / "whole")
    assert [line["step"] for line in read_lines(tmp_path / "run/metrics.jsonl")] == list(range(STEPS))
