import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from thinwire.launch.hosts import commands as commands_module
from thinwire.launch.hosts.commands import HostCommand, Outcome, gathered_signals, supervise
from thinwire.launch.shared.exit_codes import FOR_MEMORY

WAIT = "sleep 60"
SAYS_AND_ENDS = "trap 'echo told; exit 7' TERM INT; echo ready; while :; do sleep 0.05; done"
DOES_NOT_LISTEN = "trap '' TERM INT; echo ready; while :; do sleep 0.05; done"


def members(*scripts):
    return [HostCommand(f"host {index}", ["sh", "-c", script], {}) for index, script in enumerate(scripts)]


def end(commands):
    for member in commands:
        member.signal(signal.SIGKILL)
        member.finish()


def test_lines_are_labelled_and_go_where_they_were_meant_for(capfd):
    commands = members("echo one; echo two >&2", "printf 'no end of line'; echo $THINWIRE_X")
    assert supervise(commands, [], grace=10) == Outcome(0, "")
    end(commands)
    said = capfd.readouterr()
    assert sorted(said.out.splitlines()) == ["host 0 | one", "host 1 | no end of line"]
    assert said.err == "host 0 | two\n"


def test_bytes_that_are_no_text_do_not_stop_the_others(capfd):
    commands = members(r"printf '\377\n'; echo after")
    assert supervise(commands, [], grace=10).status == 0
    end(commands)
    assert capfd.readouterr().out == "host 0 | \ufffd\nhost 0 | after\n"


@pytest.mark.parametrize(
    ("script", "status", "how"),
    [
        ("exit 3", 3, "exited with status 3"),
        ("kill -KILL $$", 128 + signal.SIGKILL, f"was killed by SIGKILL {FOR_MEMORY}"),
    ],
)
def test_the_first_to_fail_gives_the_status_and_the_others_are_stopped(script, status, how):
    """`kill -9` on one host ended a cluster with status 137 and no line."""
    commands = members(WAIT, script, WAIT)
    assert supervise(commands, [], grace=0.1) == Outcome(
        status, f"host 1 failed first: it {how}; stopped 0.1 s later: host 0, host 2"
    )
    # it waits for 0.1 s, in which a busy machine may not come to end them
    assert [member.process.wait(60) for member in commands if member is not commands[1]] == [-signal.SIGTERM] * 2
    end(commands)


@pytest.mark.slow
def test_a_launcher_that_had_no_turn_gives_the_others_their_grace_time(capfd, monkeypatch):
    """After a suspended machine woke, both waits were over: it stopped the others, and did not let them end."""
    commands = members("exit 3", "trap 'sleep 0.3; echo saved; exit' TERM; echo ready; while :; do sleep 0.05; done")
    wait_until_ready(capfd, 1)
    commands[0].process.wait()
    clock, hour = [0.0], [3600.0]

    def sleep(seconds):
        clock[0] += hour.pop() if hour else seconds
        time.sleep(seconds)

    monkeypatch.setattr(commands_module, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    assert supervise(commands, [], grace=60) == Outcome(
        3, "host 0 failed first: it exited with status 3; stopped 60 s later: host 1"
    )
    end(commands)
    assert capfd.readouterr().out == "host 1 | saved\n"


@pytest.mark.slow
def test_the_others_may_end_by_themselves_after_a_failure(capfd):
    commands = members("exit 3", "sleep 0.5; echo why; exit 4")
    assert supervise(commands, [], grace=60) == Outcome(3, "host 0 failed first: it exited with status 3")
    end(commands)
    assert capfd.readouterr().out == "host 1 | why\n"


def wait_until_ready(capfd, number):
    said = ""
    while said.count("ready") < number:
        time.sleep(0.02)
        said += capfd.readouterr().out


def test_a_signal_is_passed_on(capfd):
    commands = members(SAYS_AND_ENDS, SAYS_AND_ENDS)
    wait_until_ready(capfd, 2)
    with gathered_signals() as came:
        # not SIGINT, which a shell cannot trap where the tests were started in the background
        os.kill(os.getpid(), signal.SIGTERM)
        assert supervise(commands, came, grace=60) == Outcome(143, "stopped by SIGTERM")
    end(commands)
    assert sorted(capfd.readouterr().out.splitlines()) == ["host 0 | told", "host 1 | told"]


@pytest.mark.parametrize(
    ("came", "grace", "status"), [([signal.SIGINT], 0.1, 130), ([signal.SIGTERM, signal.SIGINT], 60, 143)]
)
def test_who_does_not_listen_is_given_up(capfd, came, grace, status):
    commands = members(DOES_NOT_LISTEN)
    wait_until_ready(capfd, 1)
    assert supervise(commands, came, grace).status == status
    assert commands[0].process.poll() is None
    end(commands)
    assert commands[0].process.poll() == -signal.SIGKILL


def test_who_is_hushed_says_nothing_after_a_signal(capfd):
    """Every process of an interrupted training printed a traceback."""
    commands = [HostCommand("host 0", ["sh", "-c", SAYS_AND_ENDS], {}, hushed=True)]
    wait_until_ready(capfd, 1)
    assert supervise(commands, [signal.SIGTERM], grace=60) == Outcome(143, "stopped by SIGTERM")
    end(commands)
    assert capfd.readouterr().out == ""


def test_signals_end_the_process_again_afterwards():
    before = signal.getsignal(signal.SIGINT)
    with gathered_signals() as came:
        os.kill(os.getpid(), signal.SIGINT)
        assert came == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is before


ENDLESS = """
import os
from thinwire.launch.hosts.commands import HostCommand, supervise
member = HostCommand("host 0", ["sh", "-c", "while echo x; do :; done"], {})
supervise([member], [], 10)
member.finish()
os.write(2, b"ended")
os._exit(0)
"""


def test_a_reader_that_is_gone_ends_the_command():
    launcher = subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with launcher:
        assert launcher.stdout.readline() == b"host 0 | x\n"
        launcher.stdout.close()
        assert launcher.stderr.read().endswith(b"ended")


def test_a_terminal_that_closes_is_one_signal():
    """The kernel and the shell send SIGHUP each; a run that was writing its checkpoint took the second for hurry."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with gathered_signals() as came:
            for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGINT):
                signal.raise_signal(number)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert came == [signal.SIGHUP, signal.SIGINT]


def test_a_terminal_that_closes_after_a_signal_does_not_hurry_the_run():
    """Ctrl-C, then a window that closes: SIGHUP counted as the second signal, and cost the checkpoint under way."""
    with gathered_signals() as came:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGINT):
            signal.raise_signal(number)
    assert came == [signal.SIGINT, signal.SIGINT]


def test_nohup_is_kept():
    """A run under `nohup` stopped when its terminal closed."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with gathered_signals() as came:
            signal.raise_signal(signal.SIGHUP)
        assert came == [] and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
