"""Stage processes forked from their launcher: libraries imported, data read and tokens made once for all of them.

A fork copies one thread and the locks of all, so a process that has others is not forked: a lock that one of them held
would never open again in the copy. Then, and where there is no /proc to count threads, each stage process is a new
interpreter, which imports and reads everything itself.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from thinwire.launch.run import parent

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_THREADS = Path("/proc/self/task")


def use_one_thread() -> None:
    """Keep the libraries that this process imports from starting threads; stage processes have a number of their own.

    To be called before NumPy and torch are imported: NumPy's OpenBLAS starts its threads when it is.
    """
    os.environ["OMP_NUM_THREADS"] = "1"


def is_safe() -> bool:
    """Whether this process may be forked: it has one thread."""
    return _THREADS.is_dir() and len(list(_THREADS.iterdir())) == 1


class Forked:
    """A process that began as a copy of this one, in a session of its own, watching us.

    Args:
        work: what it does; its result is the exit status.
        environment: all its environment variables; `RANK` names it in lists of processes.
    """

    def __init__(self, work: Callable[[], int], environment: Mapping[str, str]) -> None:
        self._returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        # a signal between the fork and the new handlers would be noted in the copy of our own, and lost
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self.pid = os.fork()
        if self.pid == 0:
            _live(work, environment)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def poll(self) -> int | None:
        """Its return code, that of a signal negative; None while it runs."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        """Its return code, once it has ended."""
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
    """The copy's whole life: nothing of what the launcher had under way is gone on with."""
    status = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        parent.end_with_parent()
        os.setsid()
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
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
