"""What others can reach of a run on one machine: nothing but what listens on loopback; and what a dead one leaves."""

import signal
import time

import pytest

from support.commands import THINWIRE, started
from support.listening import listening, needs_ss
from support.tiny_run import write_recipe

pytestmark = pytest.mark.processes

ENDLESS = ["tiny.yaml", "--training.steps", "100000", "--data.held_out", "0", "--wire.timeout", "600"]


@pytest.fixture
def folder(tmp_path):
    write_recipe(tmp_path)
    return tmp_path


def trained(folder):
    metrics = folder / "runs/tiny/metrics.jsonl"
    return metrics.exists() and metrics.read_text().count("\n") >= 2


@needs_ss
def test_a_run_listens_on_loopback_only_and_its_launcher_nowhere(folder, monkeypatch):
    """The launcher's store listened on every address, and unpickled what anyone wrote into it."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with started([*THINWIRE, "train", *ENDLESS], folder) as command:
        command.wait_until(lambda: trained(folder))
        processes = command.processes()
        stages = set(command.stage_processes().values())
        assert len(stages) == 2
        assert {address for address, _ in listening(stages)} == {"127.0.0.1"}
        assert listening(processes.keys() - stages) == []


def launcher_killed(command):
    """Kill the launcher alone, and wait until no process is left: much shorter than any time-out of the run."""
    command.process.kill()
    command.process.wait()
    deadline = time.monotonic() + 60
    while alive := command.processes():
        assert time.monotonic() < deadline, f"still there: {alive.keys()}"
        time.sleep(0.05)


def left(folder):
    """The temporary folders of runs."""
    return {path for name in ("thinwire-*-*", "torchelastic_*") for path in folder.glob(name)}


def test_nothing_temporary_is_left_of_a_run_or_of_a_killed_launcher(folder):
    temporary = folder / "temporary"
    temporary.mkdir()
    with started([*THINWIRE, "train", *ENDLESS], folder, TMPDIR=str(temporary)) as command:
        command.wait_until(lambda: trained(folder))
        assert len(left(temporary)) == 1
        launcher_killed(command)
        assert not left(temporary)


def test_stages_end_when_their_launcher_is_killed_while_they_start(folder):
    with started([*THINWIRE, "train", *ENDLESS], folder) as command:
        command.wait_until(command.stage_processes)
        launcher_killed(command)
    assert command.process.returncode == -signal.SIGKILL
    assert "Traceback" not in command.stderr
