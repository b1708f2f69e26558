"""The files for SkyPilot and dstack: their own readers take them, and what they run goes on after a lost machine."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from support.commands import started
from support.hosts import hosts, processes_in
from support.pages import ROOT
from support.tiny_run import write_recipe

SKYPILOT, DSTACK = ROOT / "docker/skypilot.yaml", ROOT / "docker/thinwire.dstack.yml"
OPTIONS = "--training.steps 200 --data.held_out 0 --wire.heartbeat 5"


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


@pytest.mark.namespaces
@pytest.mark.usefixtures("can_make_hosts")
def test_what_they_run_goes_on_when_a_machine_was_lost(tmp_path):
    """The same words on each machine, as both programs run them again once they have another machine."""
    write_recipe(tmp_path)
    script = yaml.safe_load(SKYPILOT.read_text())["run"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PATH": path, "RECIPE": "tiny.yaml", "OPTIONS": OPTIONS, "RUNS": tmp_path, "OMP_NUM_THREADS": 1}
    with hosts(2, "100mbit") as made, ExitStack() as commands:

        def start():
            told = {"SKYPILOT_NODE_IPS": "\n".join(host.address for host in made), "SKYPILOT_NUM_NODES": len(made)}
            for host in made:
                words = host.command(["bash", "-c", script])
                where = {**own, **told, "SKYPILOT_NODE_RANK": host.index}
                yield commands.enter_context(started(words, tmp_path, **where))

        begun = list(start())
        begun[0].wait_until(lambda: list(tmp_path.glob("thinwire/checkpoints/step-*/manifest.json")))
        for pid in processes_in(made[1]):
            os.kill(pid, signal.SIGKILL)
        assert all(command.wait() for command in begun)
        again = list(start())
        assert [command.wait() for command in again] == [0, 0], "\n".join(command.stderr for command in again)
    assert "goes on from the checkpoint of step" in "".join(command.stdout for command in again)
    assert "which machine reaches which" in again[0].stdout
