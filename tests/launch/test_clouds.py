"""The files for SkyPilot and dstack: their own readers take them, and what they run goes on after a lost machine."""

import os
import shutil
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from support.commands import THINWIRE, TORCHRUN, started
from support.hosts import hosts, processes_in
from support.pages import ROOT
from support.tiny_run import write_recipe

SKYPILOT, DSTACK = ROOT / "docker/skypilot.yaml", ROOT / "docker/thinwire.dstack.yml"
OPTIONS = "--training.steps 200 --data.held_out 0 --wire.heartbeat 5"
PROGRAMS = {"thinwire": THINWIRE, "torchrun": TORCHRUN}
SAY = r"""#!/bin/sh
printf '%s\t' "$GLOO_SOCKET_IFNAME" "${0##*/}" "$@"
echo
"""
"""In place of a program: it says how the script would start it."""


def reader(command, program, path):
    """What a program prints that is run by the interpreter of a command; skipped where there is no such command."""
    found = shutil.which(command)
    if found is None:
        pytest.skip(f"needs {command}, which reads its own files")
    interpreter = Path(found).read_text().partition("\n")[0].removeprefix("#!")
    done = subprocess.run([interpreter, "-c", program, path], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_skypilot_reads_its_file():
    program = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
[resources] = task.resources
print(task.num_nodes, resources.use_spot, resources.job_recovery["max_restarts_on_errors"], *task.storage_mounts)
"""
    assert reader("sky", program, SKYPILOT).splitlines()[-1] == "3 True 5 /runs"


def test_dstack_reads_its_file():
    program = """
import sys, yaml
from dstack._internal.core.models.configurations import parse_run_configuration
task = parse_run_configuration(yaml.safe_load(open(sys.argv[1])))
print(task.nodes, *(event.value for event in task.retry.on_events), *(volume.path for volume in task.volumes))
"""
    assert reader("dstack", program, DSTACK).splitlines()[-1] == "3 no-capacity interruption error /runs"


def test_both_run_the_same_on_each_machine():
    names = {"NODES_IPS": "NODE_IPS", "NODES_NUM": "NUM_NODES", "DSTACK": "SKYPILOT"}
    [script] = yaml.safe_load(DSTACK.read_text())["commands"]
    for theirs, name in names.items():
        script = script.replace(theirs, name)
    assert script.replace("pip install .\n", "") == yaml.safe_load(SKYPILOT.read_text())["run"]


@pytest.fixture
def typed(tmp_path):
    """The commands that the script starts on a machine, as pairs of an interface and words; each would take seconds."""
    (tmp_path / "bin").mkdir()
    for name in PROGRAMS:
        (tmp_path / "bin" / name).write_text(SAY)
        (tmp_path / "bin" / name).chmod(0o755)
    own = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "RECIPE": "tiny.yaml", "OPTIONS": OPTIONS}
    own |= {"RUNS": str(tmp_path)}

    def commands(host, addresses):
        told = {"NODE_IPS": "\n".join(addresses), "NUM_NODES": str(len(addresses)), "NODE_RANK": str(host.index)}
        environment = {**os.environ, **own, **{f"SKYPILOT_{name}": value for name, value in told.items()}}
        words = host.command(["bash", "-c", yaml.safe_load(SKYPILOT.read_text())["run"]])
        said = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
        for interface, name, *arguments in (line.split("\t")[:-1] for line in said.splitlines()):
            yield interface, host.command([*PROGRAMS[name], *arguments])

    return commands


@pytest.mark.namespaces
@pytest.mark.usefixtures("can_make_hosts")
def test_what_they_run_goes_on_when_a_machine_was_lost(tmp_path, typed):
    """The same words on each machine, as both programs run them again once they have another machine."""
    write_recipe(tmp_path)
    with hosts(2, "100mbit") as made, ExitStack() as commands:
        addresses = [host.address for host in made]

        def start(interface, words):
            return commands.enter_context(started(words, tmp_path, GLOO_SOCKET_IFNAME=interface, OMP_NUM_THREADS=1))

        def begun():
            """What each machine looks with, after its end, and what it trains with."""
            looks, runs = zip(*(typed(host, addresses) for host in made), strict=True)
            looking = [start(*look) for look in looks]
            assert [command.wait() for command in looking] == [0, 0], "\n".join(each.stderr for each in looking)
            return looking, [start(*run) for run in runs]

        _, lost = begun()
        lost[0].wait_until(lambda: list(tmp_path.glob("thinwire/checkpoints/step-*/manifest.json")))
        for pid in processes_in(made[1]):
            os.kill(pid, signal.SIGKILL)
        assert all(command.wait() for command in lost)
        looked, again = begun()
        assert [command.wait() for command in again] == [0, 0], "\n".join(command.stderr for command in again)
    assert "goes on from the checkpoint of step" in "".join(command.stdout for command in again)
    assert "which machine reaches which" in looked[0].stdout
