"""Processes of one machine: how they end together, new or forked. They are small; what they run does not matter."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from thinwire.launch.processes import forks, parent, stage_processes
from thinwire.launch.processes.stage_processes import End, environments
from thinwire.launch.run.words import FileWords
from thinwire.launch.shared import variables
from thinwire.launch.shared.exit_codes import signal_group
from thinwire.pipeline.errors import CheckpointError


def new(script):
    """Each process a new interpreter."""
    return stage_processes.command([sys.executable, "-c", script])


def forked(script):
    """Each process a copy of this one."""
    return partial(forks.Forked, lambda: exec(script, {}) or 0)


@pytest.fixture(params=[new, forked])
def run(request, monkeypatch):
    """Run a script once under each name; how it ended. On a busy machine a process may need long to end."""
    monkeypatch.setattr(stage_processes, "GRACE", 60.0)
    return partial(ended, request.param)


def ended(start, script, *names, came=(), folder=None, **options):
    """How a script ended, run once under each name."""
    given = [{**os.environ, "NAME": name, "FOLDER": str(folder)} for name in names]
    return stage_processes.run(start(textwrap.dedent(script)), given, came, **options)


def test_processes_that_end_well_end_well(run):
    assert run("pass", "a", "b") == End()


@pytest.mark.slow
def test_a_failure_ends_the_others_and_only_it_is_a_cause(run):
    """A stage that was still importing died of the launcher's own SIGTERM, and stood on top by its rank."""
    end = run("import os, time; time.sleep(600 * (os.environ['NAME'] != 'bad')); raise SystemExit(7)", "a", "b", "bad")
    assert end == End(failed={2: 7})


@pytest.mark.slow
def test_an_exit_with_0_is_a_failure_where_another_status_means_well(run):
    """`os._exit(0)` in a stage that trained was taken for its end, and the others waited until their time-out."""
    script = "import os, time; time.sleep(600 * (os.environ['NAME'] == 'a')); os._exit(0)"
    assert run(script, "a", "bad", done=64) == End(failed={1: 0})
    assert run("raise SystemExit(64)", "a", "b", done=64).finished


@pytest.mark.slow
def test_a_killed_process_is_told_by_its_signal(run):
    script = """
        import os, signal, time
        if os.environ["NAME"] == "bad":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    """
    assert run(script, "a", "bad") == End(failed={1: -signal.SIGKILL})


@pytest.mark.slow
def test_what_is_wrong_with_what_they_share_ends_all(run):
    assert run("import time; time.sleep(600)", "a", "b", wrong=lambda: "it is damaged") == End(wrong="it is damaged")


@pytest.mark.slow
def test_what_they_share_is_not_looked_at_all_the_time(run, monkeypatch):
    """A launcher read the file of the rendezvous 20 times a second, as long as its run went on."""
    monkeypatch.setattr(stage_processes, "_LOOK", 600)
    looks = []
    assert run("import time; time.sleep(0.5)", "a", wrong=lambda: looks.append(1) or "") == End()
    assert looks == [1]


@pytest.mark.slow
def test_a_process_that_does_not_answer_is_killed_and_named(run, tmp_path, monkeypatch):
    monkeypatch.setattr(stage_processes, "GRACE", 0.5)
    script = """
        import os, pathlib, signal, time
        ready = pathlib.Path(os.environ["FOLDER"], "ready")
        if os.environ["NAME"] == "deaf":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            ready.touch()
            time.sleep(600)
        while not ready.exists():
            time.sleep(0.01)
        raise SystemExit(1)
    """
    assert run(script, "deaf", "bad", folder=tmp_path) == End(failed={1: 1}, hung=[0])


@pytest.mark.slow
def test_a_signal_to_the_launcher_stops_all_and_blames_none(run, tmp_path):
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


SAVING = """
    import os, pathlib, signal, time
    folder = pathlib.Path(os.environ["FOLDER"])
    def save(*_):
        (folder / "told").touch()
        if not (folder / "slow").exists():
            os._exit(143)
    signal.signal(signal.SIGTERM, save)
    (folder / "ready").touch()
    while True:
        time.sleep(600)
"""


def test_a_signal_reaches_a_process_that_was_forked_just_now(monkeypatch):
    """Ctrl-C at the start was lost to the stage that was forked last, which waited until its time-out."""
    monkeypatch.setattr(parent, "end_with_parent", lambda: time.sleep(0.1))
    process = forked("pass")(os.environ)
    signal_group(process, signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_processes_that_save_end_by_themselves_until_a_second_signal_comes(run, tmp_path, signals):
    came = []
    if signals == 2:
        (tmp_path / "slow").touch()

    def interrupt():
        for sign in ["ready", "told"][:signals]:
            while not (tmp_path / sign).exists():
                time.sleep(0.01)
            came.append(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    end = run(SAVING, "a", came=came, folder=tmp_path, saves=True)
    assert (end, end.finished) == (End(), False)
    assert (tmp_path / "told").exists()
    thread.join()


def test_processes_meet_in_the_private_folder_and_speak_over_loopback(tmp_path, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    first, second = environments(2, 3, tmp_path)
    assert (first["RANK"], second["RANK"], first["WORLD_SIZE"], first["OMP_NUM_THREADS"]) == ("0", "1", "2", "3")
    assert Path(first[variables.RENDEZVOUS]).parent == tmp_path
    assert first["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "wg0")
    assert environments(2, 3, tmp_path)[1]["GLOO_SOCKET_IFNAME"] == "wg0"


ORPHAN = """
    import sys, time
    from thinwire.launch.processes import parent
    assert "torch" not in sys.modules
    parent.end_with_parent()
    print("watching", flush=True)
    time.sleep(600)
"""


def orphaned(script):
    """A command that runs a script in a child, and waits."""
    launcher = f"""
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", {textwrap.dedent(script)!r}], start_new_session=True)
        time.sleep(600)
    """
    return [sys.executable, "-c", textwrap.dedent(launcher)]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_a_process_that_watches_its_parent_ends_with_it():
    """Stages that still imported torch when their launcher was killed lived on until the time-out."""
    with subprocess.Popen(orphaned(ORPHAN), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "watching\n"
        process.kill()
        # the pipe closes when its last writer, the child, has ended
        assert process.communicate(timeout=300)[0] == ""


LOCKED = """
    import os, signal, sys
    from thinwire.launch.processes import parent
    from thinwire.launch.processes.failures import stop_on_signals
    from torch.distributed import FileStore
    parent.end_with_parent()
    stop_on_signals(lambda: None, [signal.SIGTERM])
    print("watching", flush=True)
    with parent.ending_with_parent():
        FileStore("/gone/rendezvous", 2)  # tries for minutes, with Python's lock
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
@pytest.mark.processes
def test_a_process_that_waits_with_pythons_lock_ends_with_its_launcher():
    """One whose rendezvous was removed by another stage, as their launcher was killed, went on for five minutes."""
    with subprocess.Popen(orphaned(LOCKED), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "watching\n"
        time.sleep(0.2)
        process.kill()
        assert process.stdout.read() == "", "its end closes the pipe"


def test_a_process_whose_launcher_is_gone_already_ends_at_once():
    environment = {**os.environ, variables.LAUNCHER: "1" if os.getpid() != 1 else "2"}
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(ORPHAN)], env=environment, stdout=subprocess.PIPE)
    assert (found.returncode, found.stdout) == (parent.STOPPED, b"")


ALONE = """
    import os, signal, sys
    from thinwire.launch.processes import forks

    signal.signal(signal.SIGTERM, lambda *_: None)
    os.environ["OURS"] = "1"

    def work():
        said = [sorted(os.environ), os.getpgid(0) == os.getpid(), os.read(0, 1), open("/proc/self/comm").read()]
        print(said, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, flush=True)
        return 5

    forked = forks.Forked(work, {"RANK": "3"})
    print(forked.wait(), forked.poll(), os.environ["OURS"], signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="names of processes are read from /proc")
def test_a_forked_process_has_nothing_of_what_its_launcher_had_under_way():
    """Its own environment, session, input and name, signals that end it; the launcher keeps its own."""
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ALONE)], capture_output=True, text=True, input="x", timeout=600
    )
    assert found.stdout.splitlines() == ["[['RANK'], True, b'', 'thinwire 3\\n'] True", "5 5 1 set()"], found.stderr


def test_words_are_whole_and_go(tmp_path):
    """Processes of `thinwire train` met in a file that grew by some kilobytes a checkpoint, whatever was deleted."""
    one, other = FileWords(tmp_path), FileWords(tmp_path)
    for step in range(3):
        assert not other.check([f"checkpoint/{step}/0"])
        one.set(f"checkpoint/{step}/0", "a word")
        assert other.check([f"checkpoint/{step}/0"]) and other.get(f"checkpoint/{step}/0") == b"a word"
        one.delete_key(f"checkpoint/{step}/0")
        assert list(tmp_path.iterdir()) == []


def test_a_folder_of_words_that_is_gone_is_told_at_once(tmp_path):
    """Each stage waited for the others' words until the time-out, and a file store of torch for minutes."""
    words, key = FileWords(tmp_path), "checkpoint/1/0"
    shutil.rmtree(tmp_path)
    for refused in (lambda: words.set(key, "a word"), lambda: words.check([key]), lambda: words.get(key)):
        with pytest.raises(CheckpointError, match="must stay while the run goes on, and is gone; set TMPDIR"):
            refused()
    words.delete_key(key)


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="needs Linux with /proc/self/autogroup")
def test_a_low_priority_is_that_of_the_new_session_too():
    script = "from thinwire.launch.processes import parent; parent.keep_priority(); "
    script += "print(open('/proc/self/autogroup').read())"
    words = ["nice", "-n", "3", sys.executable, "-c", script]
    wanted = ["nice", str(os.nice(0) + 3)]
    assert subprocess.check_output(words, text=True, start_new_session=True).split()[-2:] == wanted
