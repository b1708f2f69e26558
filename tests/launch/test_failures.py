import signal
import sys
import textwrap
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from support.commands import started
from thinwire.compress import CodecError
from thinwire.launch.processes import failures
from thinwire.launch.processes.failures import Report, explain, once, read_reports, report_of
from thinwire.launch.processes.parent import STOPPED
from thinwire.launch.shared import variables
from thinwire.launch.shared.exit_codes import FOR_MEMORY, FailedError
from thinwire.models.errors import ModelError
from thinwire.pipeline.errors import (
    MismatchError,
    NonFiniteError,
    OptionsError,
    PeerError,
    PipelineError,
    WireError,
)

pytestmark = pytest.mark.slow


def report(rank, kind, text="something", stages=None):
    return Report(rank=rank, stages=[rank] if stages is None else stages, kind=kind, text=text)


def told(*reports, exit_codes, stages_of=lambda rank: [rank], hung=()):
    """What is told of reports that were left in this order."""
    where = SimpleNamespace(stages_of=stages_of, replica_of=lambda rank: None)
    return explain({report.rank: report for report in reports}, exit_codes, where, hung).splitlines()


def test_a_mistake_that_all_replicas_found_is_one_sentence():
    """The sentence came once for each replica, and the command ended as if its work had failed."""
    mistake = OptionsError("replicas.count must stay, got 3")
    alike = {rank: report_of(mistake, rank, [rank], replica=rank // 2) for rank in range(4)}

    def ends(more=(), exit_codes=(), hung=()):
        reports = alike | {report.rank: report for report in more}
        return failures.failure(reports, dict.fromkeys([*reports, *exit_codes], 1), hung, "all that was told")

    found = ends([report(4, "peer")])
    assert isinstance(found, OptionsError) and str(found) == "replicas.count must stay, got 3"
    others = [{"more": [report(5, "own")]}, {"more": [report_of(OptionsError("another"), 5, [5])]}]
    for other in [*others, {"exit_codes": [5]}, {"hung": [5]}]:
        found = ends(**other)
        assert isinstance(found, FailedError) and str(found) == "all that was told", other


def test_a_report_is_never_seen_half_written(tmp_path, monkeypatch):
    monkeypatch.setenv(variables.FAILURES, str(tmp_path))
    one = report(1, "own", "x" * 1_000_000)
    writer = threading.Thread(target=lambda: [one.save() for _ in range(40)])
    writer.start()
    while writer.is_alive():
        assert read_reports(tmp_path) in ({}, {1: one})
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"] * 40


def test_a_report_without_a_place_is_printed(tmp_path, monkeypatch, capfd):
    """Something had cleaned up the launcher's folder: the stage's last words were a traceback."""
    monkeypatch.setenv(variables.FAILURES, str(tmp_path / "gone"))
    report(1, "own", "no room").save()
    assert capfd.readouterr().err == "stage 1 failed: no room\n"


def test_who_leaves_first_is_told_and_others_wait_for_it():
    told, started, going_on = [], threading.Event(), threading.Event()

    @once
    def leave(report):
        started.set()
        assert going_on.wait(60)
        told.append(report.kind)

    failing = threading.Thread(target=leave, args=[report(0, "own")])
    failing.start()
    assert started.wait(60)
    stopped = threading.Thread(target=leave, args=[report(0, "stopped")])
    stopped.start()
    stopped.join(0.05)
    assert stopped.is_alive() and not told
    going_on.set()
    failing.join()
    stopped.join()
    assert told == ["own"]


# --- the order of what is printed -------------------------------------------------------------------------------------


def test_a_killed_stage_stands_above_those_that_noticed():
    assert told(
        report(0, "peer", "stage 0 was waiting for gradients from stage 1: connection reset"),
        report(2, "stopped", "stage 2 was waiting for activations from stage 1"),
        exit_codes={0: 1, 1: -9, 2: 143},
    ) == [
        f"stage 1 was killed by SIGKILL {FOR_MEMORY}",
        "  stage 0 lost a peer: stage 0 was waiting for gradients from stage 1: connection reset",
        "  stage 2 was asked to stop: stage 2 was waiting for activations from stage 1",
    ]


def test_own_failures_stand_above_peers_however_late_they_report():
    assert told(
        report(0, "peer", "awaited a"),
        report(1, "stopped", "awaited b"),
        report(3, "own", "first cause"),
        report(2, "own", "second cause"),
        exit_codes={0: 1, 2: 1, 3: 1},
    ) == [
        "stage 3 failed: first cause",
        "stage 2 failed: second cause",
        "  stage 0 lost a peer: awaited a",
        "  stage 1 was asked to stop: awaited b",
    ]


def test_stages_that_fail_for_one_reason_are_told_in_one_line():
    """All processes stop alike where disks are too small, and said so once each."""
    assert told(
        report(1, "own", "no room"),
        report(0, "own", "no room"),
        report(2, "own", "something else"),
        exit_codes={0: 1, 1: 1, 2: 1},
    ) == ["stages 0 and 1 failed: no room", "stage 2 failed: something else"]


def test_the_killed_stand_above_own_failures_in_rank_order():
    assert told(report(1, "own", "a cause"), exit_codes={3: -signal.SIGSEGV, 1: 1, 0: -signal.SIGABRT}) == [
        "stage 0 was killed by SIGABRT",
        "stage 3 was killed by SIGSEGV",
        "stage 1 failed: a cause",
    ]


def test_an_end_without_a_signal_or_a_report_is_told_by_its_status():
    assert told(exit_codes={1: 7}) == ["stage 1 exited with status 7"]


def test_where_nobody_failed_the_first_report_comes_first():
    """One stage asked to stop by SIGTERM left sentences without a cause: only what the others had been waiting for."""
    assert told(
        report(1, "stopped", "computing"),
        report(2, "peer", "awaited b"),
        report(0, "peer", "awaited a"),
        exit_codes={1: STOPPED},
    ) == [
        "stage 1 was asked to stop: computing",
        "  stage 2 lost a peer: awaited b",
        "  stage 0 lost a peer: awaited a",
    ]


def test_a_hanging_process_stands_on_top_where_nothing_else_explains_the_end():
    """A stage stopped by SIGSTOP was named nowhere: the others had waited for it, and it did not answer."""
    waited = report(0, "peer", "stage 0 was waiting for gradients from stage 1: timed out")
    assert told(waited, exit_codes={0: 1}, hung=[1]) == [
        "stage 1 hung: it did not end when it was asked to",
        "  stage 0 lost a peer: stage 0 was waiting for gradients from stage 1: timed out",
    ]
    assert told(report(2, "own", "a cause"), waited, exit_codes={0: 1, 2: 1}, hung=[1]) == [
        "stage 2 failed: a cause",
        "  stage 0 lost a peer: stage 0 was waiting for gradients from stage 1: timed out",
        "  stage 1 hung: it did not end when it was asked to",
    ]


def test_processes_are_named_by_their_stages():
    assert told(
        report(0, "own", "a cause", stages=[0, 3]),
        report(5, "peer", "awaited", stages=[]),
        exit_codes={1: -9, 0: 1, 5: 1},
        stages_of=lambda rank: [rank, 3 - rank],
    ) == [
        f"the process of stages 1 and 2 was killed by SIGKILL {FOR_MEMORY}",
        "stages 0 and 3 failed: a cause",
        "  a process without a stage lost a peer: awaited",
    ]


# --- one report ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (NonFiniteError("NaN in the activations"), "own", "NaN in the activations"),
        (WireError("not the planned frame"), "own", "not the planned frame"),
        (MismatchError("differ in:\n  seed: 0 here, 1 there"), "own", "differ in:\n  seed: 0 here, 1 there"),
        (OptionsError(["first", "second"]), "own", "first\nsecond"),
        (PipelineError("a sentence"), "own", "a sentence"),
        (ModelError("no such layer"), "own", "no such layer"),
        (CodecError("no such codec"), "own", "no such codec"),
        (PeerError("stage 0 was waiting: closed"), "peer", "stage 0 was waiting: closed"),
    ],
)
def test_our_own_errors_are_reported_as_their_sentence(error, kind, text):
    made = report_of(error, 1, [1])
    assert (made.rank, made.stages, made.kind, made.text) == (1, [1], kind, text)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, KeyError, AssertionError, MemoryError])
def test_foreign_errors_keep_their_traceback(kind):
    def somewhere():
        raise kind("what happened")

    with pytest.raises(kind) as caught:
        somewhere()
    made = report_of(caught.value, 0, [0])
    assert made.kind == "own"
    assert made.text.startswith("Traceback (most recent call last):")
    assert "in somewhere" in made.text
    assert made.text.splitlines()[-1].startswith(f"{kind.__name__}: ")


def test_reports_are_read_back_as_saved(tmp_path, monkeypatch):
    monkeypatch.setenv(variables.FAILURES, str(tmp_path))
    saved = [report(0, "own", 'two\nlines "é"'), report(3, "stopped", stages=[3, 4])]
    for one in saved:
        one.save()
    assert read_reports(tmp_path) == {0: saved[0], 3: saved[1]}


def test_reports_are_in_the_order_they_were_left_whatever_the_clocks_say(tmp_path, monkeypatch):
    """A clock one day behind put the wrong stage on top: reports were ordered by it."""
    monkeypatch.setenv(variables.FAILURES, str(tmp_path))
    for rank, clock in ((2, 2_000_000_000), (0, 1_000_000_000), (1, 1_500_000_000)):
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        report(rank, "peer", "awaited").save()
    assert list(read_reports(tmp_path)) == [2, 0, 1]


def test_a_report_under_way_when_its_process_was_killed_is_none(tmp_path):
    (tmp_path / "1.part").write_text("{")
    assert read_reports(tmp_path) == {}


# --- being stopped ------------------------------------------------------------------------------------------------

WAITING = """
    import signal, sys, threading, time
    from thinwire.launch.processes.failures import Report, stop_on_signals

    report = Report(rank=0, stages=[0], kind="stopped", text="blocked")
    stop_on_signals(report.save, [signal.SIGTERM])
    print("ready", flush=True)
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
"""


BY_A_LAUNCHER = """
    import os, time

    if os.fork():
        time.sleep(600)
    os.setsid()
"""


@contextmanager
def running(code, folder, **variables):
    """A process that runs `code` and has printed "ready"; it is killed at the end."""
    (folder / "waiting.py").write_text(textwrap.dedent(code))
    with started([sys.executable, "waiting.py"], folder, **variables) as command:
        command.wait_until(lambda: command.stdout == "ready\n")
        yield command


def test_a_signal_ends_a_blocked_process_with_a_report(monkeypatch, tmp_path):
    monkeypatch.delenv(variables.FAILURES, raising=False)
    with running(WAITING, tmp_path) as command:
        command.process.terminate()
        assert (command.wait(), command.stderr) == (STOPPED, "stage 0 was asked to stop: blocked\n")


def test_a_process_ends_when_its_launcher_is_killed(tmp_path):
    """Stages went on training, unseen, after `kill -9` of their launcher: they live in sessions of their own."""
    with running(BY_A_LAUNCHER + WAITING, tmp_path, **{variables.FAILURES: str(tmp_path)}) as command:
        assert len(command.processes()) == 2
        command.process.kill()
        deadline = time.monotonic() + 60
        while command.processes():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert read_reports(tmp_path)[0].kind == "stopped"


def test_a_report_that_cannot_be_saved_does_not_keep_a_process(tmp_path):
    with running(WAITING, tmp_path, **{variables.FAILURES: str(tmp_path / "gone")}) as command:
        command.process.terminate()
        assert command.wait() == STOPPED
