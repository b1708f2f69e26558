"""Processes of one machine: how they end together. The commands here are small; what they run does not matter."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from thinwire.launch.run import local, parent
from thinwire.launch.run.local import End, environments


def run(script, *names, came=(), folder=None):
    """Run a script once under each name; how it ended."""
    given = [{**os.environ, "NAME": name, "FOLDER": str(folder)} for name in names]
    return local.run([sys.executable, "-c", textwrap.dedent(script)], given, came)


def test_processes_that_end_well_end_well():
    assert run("pass", "a", "b") == End()


def test_a_failure_ends_the_others_and_only_it_is_a_cause():
    """A stage that was still importing died of the launcher's own SIGTERM, and stood on top by its rank."""
    end = run("import os, time; time.sleep(600 * (os.environ['NAME'] != 'bad')); raise SystemExit(7)", "a", "b", "bad")
    assert end == End(failed={2: 7})


def test_a_killed_process_is_told_by_its_signal():
    script = """
        import os, signal, time
        if os.environ["NAME"] == "bad":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    """
    assert run(script, "a", "bad") == End(failed={1: -signal.SIGKILL})


def test_a_process_that_does_not_answer_is_killed_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "GRACE", 0.5)
    script = """
        import os, pathlib, signal, time
        ready = pathlib.Path(os.environ["FOLDER"], "ready")
        if os.environ["NAME"] == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ready.touch()
            time.sleep(600)
        while not ready.exists():
            time.sleep(0.01)
        raise SystemExit(1)
    """
    assert run(script, "deaf", "bad", folder=tmp_path) == End(failed={1: 1}, hung=[0])


def test_a_signal_to_the_launcher_stops_all_and_blames_none(tmp_path):
    came = []

    def interrupt():
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        came.append(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    script = """
        import os, pathlib, time
        pathlib.Path(os.environ["FOLDER"], os.environ["NAME"]).touch()
        time.sleep(600)
    """
    assert run(script, "a", "b", came=came, folder=tmp_path) == End()
    thread.join()


def test_processes_meet_in_the_private_folder_and_speak_over_loopback(tmp_path, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    first, second = environments(2, 3, tmp_path)
    assert (first["RANK"], second["RANK"], first["WORLD_SIZE"], first["OMP_NUM_THREADS"]) == ("0", "1", "2", "3")
    assert Path(first[local.MEETING_VARIABLE]).parent == tmp_path
    assert first["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "wg0")
    assert environments(2, 3, tmp_path)[1]["GLOO_SOCKET_IFNAME"] == "wg0"


ORPHAN = """
    import sys, time
    from thinwire.launch.run import parent
    assert "torch" not in sys.modules
    parent.end_with_parent()
    print("watching", flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_a_process_that_watches_its_parent_ends_with_it():
    """Stages that still imported torch when their launcher was killed lived on until the time-out."""
    launcher = f"""
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", {textwrap.dedent(ORPHAN)!r}], start_new_session=True)
        time.sleep(600)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(launcher)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "watching\n"
        process.kill()
        # the pipe closes when its last writer, the child, has ended
        assert process.communicate(timeout=60)[0] == ""


def test_a_process_whose_launcher_is_gone_already_ends_at_once():
    environment = {**os.environ, parent.VARIABLE: "1" if os.getpid() != 1 else "2"}
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(ORPHAN)], env=environment, stdout=subprocess.PIPE)
    assert (found.returncode, found.stdout) == (parent.STOPPED, b"")
