"""`thinwire cluster` as a user starts it; what hosts and crews do is tested beside them."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from support.commands import THINWIRE, completed, hosts_of, started
from thinwire.launch import cli, cluster
from thinwire.launch.hosts import namespaces
from thinwire.launch.recipe import recipe
from thinwire.pipeline.errors import OptionsError

RECIPE = """
model:
  name: gpt2
  config:
    {vocab_size: 256, n_layer: 2, n_embd: 16, n_head: 2, n_positions: 16, resid_pdrop: 0, embd_pdrop: 0, attn_pdrop: 0}
data: {name: text, block_size: 16, held_out: 0}
pipeline: {num_stages: 2, num_microbatches: 2, microbatch_size: 2}
training: {steps: 2}
"""
RUN = [*THINWIRE, "cluster", "run"]


def real(test):
    """Mark a test that makes hosts."""
    return pytest.mark.namespaces(pytest.mark.usefixtures("can_make_hosts")(test))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    (tmp_path / "text").write_bytes(b"some words, many times; " * 83)
    return tmp_path


# --- what each host runs ------------------------------------------------------------------------------------------


def test_a_training_becomes_a_torchrun_node_on_each_host():
    wanted = recipe.parse(["quickstart", "--training.threads", "3"])
    job = cluster.training(wanted, ["quickstart", "--training.threads", "3"], num_hosts=2)
    assert [" ".join(command[1:]) for command in job.commands] == [
        f"-m torch.distributed.run --nnodes 2 --node-rank {host} --nproc-per-node 2 --master-addr 10.0.0.1 "
        "--master-port 29500 -m thinwire.launch.train quickstart --training.threads 3"
        for host in (0, 1)
    ]
    assert {command[0] for command in job.commands} == {sys.executable}
    assert job.environment["OMP_NUM_THREADS"] == "3"
    assert [job.where.stages_of(rank) for rank in range(4)] == [[0], [1], [2], [3]]


def test_restarts_of_a_training_are_those_of_its_torchrun():
    """They were left out without a word, so a stage that died ended the run."""
    arguments = ["quickstart", "--max-restarts", "2"]
    for command in cluster.training(recipe.parse(arguments), arguments, num_hosts=2).commands:
        assert command[command.index("--max-restarts") + 1] == "2"
        assert command.index("--max-restarts") < command.index("thinwire.launch.train")


def test_stages_must_divide_over_the_hosts():
    with pytest.raises(OptionsError) as caught:
        cluster.training(recipe.parse(["quickstart"]), ["quickstart"], num_hosts=3)
    said = "hosts must divide the recipe's 4 processes, got 3; change --hosts or pipeline.num_stages"
    assert str(caught.value) == said


def test_any_other_command_runs_as_it_is():
    job = cluster.plan(["python", "script.py"], 2)
    assert job.commands == [["python", "script.py"]] * 2
    assert job.where is None


# --- mistakes, told before anything is made ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("run", "thinwire cluster run needs a command after --, as in thinwire cluster run -- thinwire train RECIPE\n"),
        (
            "run -- thinwire simulate quickstart",
            "thinwire simulate is one process and sends nothing to other hosts; run thinwire train\n",
        ),
        (
            "run --bandwidth 100 --latency 20 --loss 1 --link 1 -- true",
            "a bandwidth must be like 500kbit, 100mbit, 1gbit, or none, got '100'\n"
            "a latency must be like 500us, 20ms or 1s, got '20'\n"
            "a loss must be like 0.1% or 1%, got '1'\n"
            "a link must be like 1-2:20mbit, or 1>2:20mbit for one direction, got '1'\n",
        ),
        ("run --link 0-2:1mbit -- true", "a link must join two of the hosts 0 to 1, got 0 and 2\n"),
        (
            "run --hosts abc -- true",
            "argument --hosts: must be a whole number, got 'abc'; see thinwire cluster run --help\n",
        ),
        ("run --loss 150% -- true", "loss must be at least 0 and below 100%, got 150%\n"),
        (
            "run --hosts 2 thinwire train quickstart",
            "give -- before the command of the hosts: thinwire cluster run ... -- thinwire train quickstart\n",
        ),
        ("run --hostz 2 -- true", "unrecognized arguments: --hostz 2; see thinwire cluster run --help\n"),
        (
            "run -- thinwire train quickstart --wire.timeout 0",
            "wire.timeout must be from 0.01 to 1e6 seconds, got 0.0\n",
        ),
        ("stop", "thinwire cluster has no 'stop'; known: run, clean\n"),
    ],
)
def test_mistakes_have_status_2(monkeypatch, capsys, given, said):
    monkeypatch.setattr(cluster, "missing", lambda links: "")
    monkeypatch.setattr(cluster, "Cluster", lambda links: pytest.fail("made a cluster"))
    assert cli.main(["cluster", *given.split()]) == 2
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize("given", ["run -- true", "clean"])
def test_what_is_missing_is_one_sentence(monkeypatch, capsys, given):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(namespaces, "_run", lambda command: pytest.fail(f"ran {command}"))
    assert cli.main(["cluster", *given.split()]) == 2
    said = "a cluster needs root, for network namespaces and traffic control; start the command with sudo\n"
    assert capsys.readouterr() == ("", said)


def test_help_tells_the_actions_and_their_options(capsys):
    assert cli.main(["cluster"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in cluster.ACTIONS)
    with pytest.raises(SystemExit) as caught:
        cli.main(["cluster", "run", "--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    for option in ("hosts", "bandwidth", "latency", "loss", "link"):
        assert f"--{option}" in said


# --- for real ------------------------------------------------------------------------------------------------------


@real
def test_a_recipe_is_trained_over_two_hosts(folder):
    options = ["--hosts", 2, "--bandwidth", "100mbit", "--link", "0>1:50mbit"]
    command = completed([*RUN, *options, "--", "thinwire", "train", "tiny.yaml", "--output", "run"], folder)
    assert command.status == 0, command.stderr
    lines = command.stdout.splitlines()
    here = "host 0 | stage 0 is done; what this host keeps is in run"
    assert [line for line in lines if not line.startswith("host 1 | ")] == [here]
    assert "host 1 | step 2/2  loss " in command.stdout
    # a slow machine may take more than ten seconds to start the second host; and torchrun on the first may end, with
    # its store, before the other has read there that both are done, which torchrun then says
    expected = ("waits for all", "torch/distributed/elastic/agent/")
    assert [line for line in command.stderr.splitlines() if not any(part in line for part in expected)] == []
    assert json.loads((folder / "run/summary.json").read_text())["steps"] == 2
    assert hosts_of(command.process.pid) == set()


LEARN = """
echo "$THINWIRE_HOST of $THINWIRE_HOSTS: $NODE_RANK $MASTER_ADDR:$MASTER_PORT"
ip -br -4 addr show dev "$GLOO_SOCKET_IFNAME" | grep -o "10[0-9./]*"
test -z "$THINWIRE_FAILURES" || echo "its failures would not be told"
exit $((THINWIRE_HOST * 3))
"""


@real
def test_a_command_learns_where_it_runs_and_the_first_failure_is_the_status(folder):
    command = completed([*RUN, "--hosts", 2, "--", "sh", "-c", LEARN], folder)
    assert (command.status, command.stderr) == (3, "host 1 failed first: it exited with status 3\n")
    for host in range(2):
        label = f"host {host} | "
        assert [line.removeprefix(label) for line in command.stdout.splitlines() if line.startswith(label)] == [
            f"{host} of 2: {host} 10.0.0.1:29500",
            f"10.0.0.{host + 1}/24",
        ]


SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item()}")
dist.destroy_process_group()
"""


@real
def test_torchrun_is_one_group_over_all_hosts(folder):
    (folder / "script.py").write_text(SCRIPT)
    torchrun = Path(sys.executable).with_name("torchrun")
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "LOGLEVEL": "CRITICAL"}
    command = completed([*RUN, "--hosts", 2, "--", torchrun, "--nproc-per-node", 1, "script.py"], folder, **quiet)
    assert command.status == 0, command.stderr
    assert set(command.stdout.splitlines()) == {f"host {host} | rank {host} of 2: 3.0" for host in range(2)}


@real
def test_an_interrupt_ends_all_and_leaves_nothing(folder):
    with started([*RUN, "--", "sh", "-c", "echo ready; exec sleep 60"], folder) as command:
        command.wait_until(lambda: command.stdout.count("ready") == 2)
        assert len(hosts_of(command.process.pid)) == 3
        command.process.send_signal(signal.SIGINT)
        assert command.wait() == 130
        assert command.processes() == {}
    assert hosts_of(command.process.pid) == set()


@real
def test_what_a_killed_run_leaves_is_cleaned(folder, capsys):
    with started([*RUN, "--", "sh", "-c", "echo ready; exec sleep 60"], folder) as command:
        command.wait_until(lambda: command.stdout.count("ready") == 2)
        command.process.kill()
        command.process.wait()
        left = hosts_of(command.process.pid)
        assert len(left) == 3
        assert cli.main(["cluster", "clean"]) == 0
        assert {line.removeprefix("removed ") for line in capsys.readouterr().out.splitlines()} >= left
        assert command.processes() == {}
    assert hosts_of(command.process.pid) == set()
