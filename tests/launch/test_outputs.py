"""The files that a run writes, when they cannot be written."""

import shutil
import threading

import pytest

from thinwire.launch.run.outputs import MetricsLog


def test_an_error_of_tensorboard_is_raised_to_the_run_without_a_traceback(tmp_path, monkeypatch):
    """On a full disk, a traceback of the thread that writes points stood before the sentence of the run."""
    printed = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    log = MetricsLog(tmp_path)
    shutil.rmtree(tmp_path / "tensorboard")
    log.recipe("name: x")
    with pytest.raises(FileNotFoundError, match="tensorboard"):
        log.close()
    assert printed == []
    other = threading.Thread(target=lambda: 1 / 0)
    other.start()
    other.join()
    assert [failed.exc_type for failed in printed] == [ZeroDivisionError]


def test_a_log_that_is_closed_leaves_no_trace_in_threads(tmp_path, monkeypatch):
    hook = print
    monkeypatch.setattr(threading, "excepthook", hook)
    MetricsLog(tmp_path).close()
    assert threading.excepthook is hook
