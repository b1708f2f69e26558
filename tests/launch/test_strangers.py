"""What others can reach of a run on one machine: nothing but what listens on loopback; and what a dead one leaves."""

import re
import shutil
import signal
import subprocess
import time

import pytest

from support.commands import THINWIRE, started

pytestmark = pytest.mark.processes

ENDLESS = ["quickstart", "--training.steps", "100000", "--data.held_out", "0", "--wire.timeout", "600"]


def listening(pids):
    """The addresses at which processes listen."""
    listed = subprocess.run(["ss", "-H", "-ltnp"], check=True, capture_output=True, text=True).stdout
    return {
        line.split()[3].rpartition(":")[0]
        for line in listed.splitlines()
        if any(int(pid) in pids for pid in re.findall(r"pid=(\d+)", line))
    }


def trained(folder):
    metrics = folder / "runs/quickstart/metrics.jsonl"
    return metrics.exists() and metrics.read_text().count("\n") >= 2


@pytest.mark.skipif(shutil.which("ss") is None, reason="ss, of iproute2, lists who listens where")
def test_a_run_listens_on_loopback_only_and_its_launcher_nowhere(tmp_path, monkeypatch):
    """The launcher's store listened on every address, and unpickled what anyone wrote into it."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with started([*THINWIRE, "train", *ENDLESS], tmp_path) as command:
        command.wait_until(lambda: trained(tmp_path))
        processes = command.processes()
        stages = set(command.stage_processes().values())
        assert len(stages) == 4
        assert listening(stages) == {"127.0.0.1"}
        assert listening(processes.keys() - stages) == set()


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


def test_nothing_temporary_is_left_of_a_run_or_of_a_killed_launcher(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with started([*THINWIRE, "train", *ENDLESS], tmp_path, TMPDIR=str(temporary)) as command:
        command.wait_until(lambda: trained(tmp_path))
        assert len(left(temporary)) == 1
        launcher_killed(command)
        assert not left(temporary)


def test_stages_end_when_their_launcher_is_killed_while_they_start(tmp_path):
    with started([*THINWIRE, "train", *ENDLESS], tmp_path) as command:
        command.wait_until(command.stage_processes)
        launcher_killed(command)
    assert command.process.returncode == -signal.SIGKILL
    assert "Traceback" not in command.stderr
