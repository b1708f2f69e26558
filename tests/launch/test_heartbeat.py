"""Heartbeats: who is silent is told, whoever computes is not."""

import math
import os
import queue
import signal
import subprocess
import sys
import textwrap
from functools import partial

import pytest

from thinwire.launch.processes import forks, heartbeat, stage_processes
from thinwire.launch.processes.heartbeat import EVERY, Silence
from thinwire.launch.shared.doing import Doing

TOO_LONG = (
    "sent no heartbeat for 3.5 s, and wire.heartbeat allows 3 s: the process is stopped, or something keeps Python's "
    "lock (the GIL), or the host or the link is gone"
)


class Clock:
    """A time that only the test moves, a listener looking all the while."""

    def __init__(self):
        self.now = 100.0
        self.silence = Silence(3.0, 100.0, lambda: self.now, stopped=0.5)

    def wait(self, seconds, **given):
        """Who has been silent for too long by then."""
        for _ in range(round(seconds / EVERY)):
            self.silence.too_long()
            self.now += EVERY
        return self.silence.too_long(**given)


def test_a_process_that_trains_may_be_silent_for_so_long_and_no_longer():
    clock = Clock()
    clock.silence.received(0, Doing.TRAINING)
    clock.silence.received(1, Doing.TRAINING)
    assert clock.wait(3) == {}
    clock.silence.received(1, Doing.TRAINING)
    assert clock.wait(0.5) == {0: TOO_LONG}


@pytest.mark.parametrize(
    ("doing", "said"),
    [
        (Doing.IMPORTING, "importing libraries"),
        (Doing.READING, "reading its data and its model"),
        (Doing.BUILDING, "building its stages, or taking the first step"),
        (Doing.ENDING, "ending, after the last step"),
    ],
)
def test_a_process_that_does_not_train_may_be_silent_for_the_timeout_unless_it_is_stopped(doing, said):
    clock = Clock()
    clock.silence.received(0, doing)
    clock.silence.received(1, doing)
    assert clock.wait(20) == {}
    stopped = (
        "is stopped, as by SIGSTOP or a debugger, and sent no heartbeat for 20.0 s; wire.heartbeat of 3 s allows 1.5 s "
        "to a stopped process"
    )
    assert clock.wait(0, is_stopped=lambda rank: rank == 1) == {1: stopped}
    assert clock.wait(80) == {}
    assert clock.wait(0.5)[0] == (
        f"sent no heartbeat for 100.5 s while it was {said}, and wire.timeout allows 100 s for that; if the machine or "
        f"its disk is so slow, raise --wire.timeout"
    )


@pytest.mark.parametrize("doing", [Doing.TRAINING, Doing.BUILDING])
def test_a_stopped_process_is_told_after_half_the_time(doing):
    """After all of it, a busy machine had no time left to tell it within `wire.heartbeat`."""
    clock = Clock()
    for rank in (0, 1):
        clock.silence.received(rank, doing)
    assert clock.wait(1.5, is_stopped=lambda rank: rank == 1) == {}
    assert clock.wait(0.5, is_stopped=lambda rank: rank == 1).keys() == {1}


def test_who_had_no_turn_to_listen_blames_nobody():
    """After a suspended machine wakes, or a container is paused, everybody has been silent."""
    clock = Clock()
    clock.silence.received(0, Doing.TRAINING)
    clock.now += 3600
    assert clock.silence.too_long() == {}
    assert clock.wait(3) == {}
    assert clock.wait(0.5) == {0: TOO_LONG}


def test_a_listener_that_often_has_no_turn_still_notices():
    """Every time without a turn excused all the silence before it, so that a busy machine noticed no dead host."""
    clock = Clock()
    clock.silence.received(0, Doing.TRAINING)
    for _ in range(3):
        assert clock.wait(1) == {}
        clock.now += 10
        assert clock.silence.too_long() == {}
    assert clock.wait(0.5) == {0: TOO_LONG}


def test_a_process_tells_at_once_that_it_trains(monkeypatch):
    """A host that died within half a second of its first steps was missed for a minute, as one that had not begun."""
    monkeypatch.setattr(heartbeat, "EVERY", math.inf)
    does, heard = [Doing.BUILDING], queue.SimpleQueue()
    beating = heartbeat.Pulse()
    beating.doing = lambda: does[-1]
    beating.add(heard.put)
    for doing in (Doing.TRAINING, Doing.ENDING):
        does.append(doing)
        while heard.get(timeout=600) is not doing:
            pass
    beating._listeners.clear()


def test_who_is_forgotten_is_not_expected():
    clock = Clock()
    clock.silence.received(0, Doing.TRAINING)
    clock.silence.forget(0)
    assert clock.wait(100) == {}


def new(script):
    """Each process a new interpreter."""
    return stage_processes.command([sys.executable, "-c", textwrap.dedent(script)])


def forked(script):
    """Each process a copy of this one."""
    return partial(forks.Forked, lambda: exec(textwrap.dedent(script), {}) or 0)


SILENT = {
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "holding Python's lock": "ctypes.PyDLL(None).sleep(600)",
}
SCRIPT = """
    import ctypes, os, signal, time
    from thinwire.launch.processes import heartbeat
    heartbeat.begin().doing = lambda: heartbeat.Doing.{doing}
    time.sleep(2 * heartbeat.EVERY)
    if os.environ["NAME"] == "bad":
        {silent}
    time.sleep(600)
"""


def ended(start, *names):
    """How processes ended of which one is silent. A busy machine may keep any from running for a second or two."""
    return stage_processes.run(start, [{**os.environ, "NAME": name} for name in names], [], heartbeat=4.0)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a stopped process is found in /proc")
@pytest.mark.parametrize("start", [new, forked])
@pytest.mark.parametrize(
    ("why", "doing"), [("stopped", "TRAINING"), ("stopped", "BUILDING"), ("holding Python's lock", "TRAINING")]
)
def test_a_silent_process_is_killed_and_the_others_are_stopped(start, why, doing):
    end = ended(start(SCRIPT.format(doing=doing, silent=SILENT[why])), "good", "bad")
    assert (end.failed, list(end.silent), end.hung) == ({1: -signal.SIGKILL}, [1], [])
    assert end.silent[1].startswith("is stopped, as by SIGSTOP" if why == "stopped" else "sent no heartbeat for")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a stopped process is found in /proc")
@pytest.mark.parametrize(("why", "doing"), [("stopped", "BUILDING"), ("holding Python's lock", "TRAINING")])
def test_a_watcher_kills_its_silent_process(why, doing):
    """torchrun waited 30 s before it killed a stopped process, and a neighbour on another host could not."""
    script = "from thinwire.launch.processes import heartbeat; heartbeat.begin_watcher(0.5, 60)\n"
    script += textwrap.dedent(SCRIPT).format(doing=doing, silent=SILENT[why])
    environment = {**os.environ, "RANK": "7", "NAME": "bad"}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert "process 7 " in ended.stderr and "sent no heartbeat for" in ended.stderr and "0.5 s" in ended.stderr


def test_a_watcher_ends_with_its_process():
    script = "from thinwire.launch.processes import heartbeat; heartbeat.begin_watcher(3.0, 60); heartbeat.begin()"
    environment = {**os.environ, "RANK": "0"}
    # the pipe is held open by whoever has not ended
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="libc is loaded by the name it has on Linux")
def test_a_computation_that_gives_pythons_lock_away_is_no_silence():
    """ctypes.CDLL gives the lock away, as torch does."""
    script = """
        import ctypes
        from thinwire.launch.processes import heartbeat
        heartbeat.begin().doing = lambda: heartbeat.Doing.TRAINING
        ctypes.CDLL(None).sleep(9)
    """
    assert ended(new(script), "busy") == stage_processes.End()


@pytest.mark.skipif(sys.platform != "linux", reason="a stopped process is found in /proc")
def test_a_stopped_process_is_found():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        try:
            assert not heartbeat.is_stopped(process.pid)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            assert heartbeat.is_stopped(process.pid)
        finally:
            process.kill()
    assert not heartbeat.is_stopped(process.pid)


@pytest.mark.slow
def test_a_launcher_that_does_not_read_keeps_nobody_waiting(monkeypatch):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    monkeypatch.setenv(heartbeat.VARIABLE, str(writing))
    monkeypatch.setattr(heartbeat.Pulse, "_beat", lambda _: None)  # else its own beats come between
    beating = heartbeat.begin()
    [tell] = beating._listeners
    for _ in range(1 << 17):
        tell(Doing.TRAINING)
    assert os.read(reading, 4) == b"tttt"
    beating._listeners.clear()


@pytest.mark.slow
def test_a_start_longer_than_the_heartbeat_is_no_silence():
    """A library may keep Python's lock all the while it is loaded."""
    script = """
        import ctypes
        from thinwire.launch.processes import heartbeat
        beating = heartbeat.begin()
        ctypes.PyDLL(None).sleep(4)
    """
    [environment] = [{**os.environ}]
    assert stage_processes.run(new(script), [environment], [], heartbeat=1.5, timeout=60) == stage_processes.End()
    assert list(stage_processes.run(new(script), [environment], [], heartbeat=1.5, timeout=2).silent) == [0]
