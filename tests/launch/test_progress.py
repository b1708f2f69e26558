"""What a terminal is told while there is nothing else to show."""

import io
import re
import threading
import time

import pytest

from thinwire.launch.shared import progress


class Screen(io.StringIO):
    """Output that says that it is a terminal, or that it is none."""

    def __init__(self, watched):
        super().__init__()
        self.isatty = lambda: watched


def test_a_long_wait_says_what_for_and_a_short_one_nothing(capsys):
    with progress.patient("waits for another", seconds=60):
        pass
    assert capsys.readouterr() == ("", "")
    with progress.patient("waits for another", seconds=0.01):
        for _ in range(1000):
            if "another" in (said := capsys.readouterr().err):
                break
            time.sleep(0.01)
    assert said == "waits for another\n"


@pytest.fixture
def screen(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(progress, "PATIENCE", 0.01)

    def replaced(watched=True):
        made = Screen(watched)
        monkeypatch.setattr("sys.stdout", made)
        return made

    return replaced


def counters():
    """The threads that count seconds; others of this process may begin and end meanwhile."""
    return [thread for thread in threading.enumerate() if thread.name == progress._COUNTER]


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_long_work_counts_its_seconds_and_leaves_no_line(screen):
    """A model of many layers was cut for minutes, and nothing moved."""
    shown = screen()
    with progress.showing("cutting the model"):
        wait_for(lambda: " s" in shown.getvalue())
    first, _, rest = shown.getvalue().partition("\n")
    assert first == "cutting the model ..."
    assert re.match(r"\.\.\. \d+ s\x1b\[K\r", rest) and rest.endswith("\r\x1b[K")


def test_no_thread_is_left_to_fork_with(screen):
    screen()
    with pytest.raises(ZeroDivisionError), progress.showing("cutting the model"):
        wait_for(counters)
        1 / 0  # noqa: B018
    assert counters() == []


def test_work_inside_of_other_work_is_not_counted_twice(screen):
    screen()
    with progress.showing("scoring"), progress.counting():
        assert len(counters()) == 1


def test_work_that_is_soon_done_counts_nothing(screen, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 60.0)
    shown = screen()
    with progress.showing("cutting the model"):
        pass
    assert shown.getvalue() == "cutting the model ...\n"


@pytest.mark.parametrize(("watched", "rank"), [(False, "0"), (True, "1")])
def test_programs_and_other_processes_are_told_nothing(screen, monkeypatch, watched, rank):
    monkeypatch.setenv("RANK", rank)
    shown = screen(watched)
    with progress.showing("cutting the model"):
        assert counters() == []
    assert shown.getvalue() == ""
