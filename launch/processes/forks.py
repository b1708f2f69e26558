"""Stage processes as forks of their launcher: it imports the libraries and reads the data once for all of them.

A fork copies one thread, but the locks of all threads. A lock that another thread held would stay locked in the copy
for ever, so a process with several threads is not forked. Then, and without /proc to count threads, each stage process
is a new interpreter, which imports and reads everything itself.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from thinwire.launch.processes import parent
from thinwire.launch.shared.signals import SIGNALS

_THREADS = Path("/proc/self/task")


def use_one_thread() -> None:
    """Keep the libraries that this process imports from starting threads. Stage processes set their own number.

    Call it before NumPy and torch are imported: OpenBLAS of NumPy starts its threads at import. So does Arrow, which
    data sets, tables and scikit-learn import.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")


def is_safe() -> bool:
    """Whether this process may be forked: it has one thread."""
    return _THREADS.is_dir() and len(list(_THREADS.iterdir())) == 1


class Forked:
    """A fork of this process, in its own session. It ends if this process ends.

    It calls `work`, whose result is the exit status, in this environment alone; lists of processes show its `RANK`.
    """

    def __init__(self, work: Callable[[], int], environment: Mapping[str, str]) -> None:
        self._returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        # a signal between the fork and the new handlers would go to the copy of our handlers, and get lost
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self.pid = os.fork()
        if self.pid == 0:
            _live(work, environment)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def poll(self) -> int | None:
        """Its return code, or minus the number of the signal that killed it; None while it runs."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        """Wait until it has ended; its return code."""
        code = self._reap(0)
        assert code is not None, "it was waited for"
        return code

    def _reap(self, options: int) -> int | None:
        if self._returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self._returncode = os.waitstatus_to_exitcode(status)
        return self._returncode


def _live(work: Callable[[], int], environment: Mapping[str, str]) -> NoReturn:
    """Run `work` in the fork and exit. Nothing else that the launcher was doing goes on in the fork."""
    status = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        parent.end_with_parent()
        os.setsid()
        parent.keep_priority()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        parent.name_process(f"thinwire {environment.get('RANK', '')}".rstrip())
        status = work()
        sys.stdout.flush()
        sys.stderr.flush()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)
