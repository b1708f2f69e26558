"""The end of a stage process with its launcher: a stage must not go on alone after its launcher has ended.

A stage process sets this up first. To import torch takes seconds, and in that time nothing else would notice that the
launcher has ended. So this file imports only the standard library.

    python -m thinwire.launch.processes.parent COMMAND ...      a command of thinwire that ends with its parent
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from thinwire.launch.shared import variables

STOPPED = 143
"""The exit status of a process after SIGTERM."""
DONE = 64
"""That of a launcher's stage whose run has ended: with 0 ends what calls `os._exit(0)` inside of it."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def end_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent ends (on Linux). End at once if it has ended already.

    SIGINT ends this process without a word, where Python would print a traceback.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if launcher_is_gone():
        os._exit(STOPPED)
    keep_priority()


@contextmanager
def ending_with_parent() -> Iterator[None]:
    """Around code that keeps Python's lock: the kernel ends this process with its launcher, as no thread of it can."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if launcher_is_gone():
        os._exit(STOPPED)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def keep_priority() -> None:
    """Give the session that this process leads its low priority (on Linux): `nice thinwire` means all that it starts.

    The kernel divides the processors between sessions first. A new session has the usual priority, and that of its
    processes would only count among themselves.
    """
    niceness = os.nice(0)
    if niceness > 0 and os.getsid(0) == os.getpid():
        with suppress(OSError), open("/proc/self/autogroup", "w") as file:  # noqa: PTH123 - pathlib takes longer
            file.write(str(niceness))  # fails on a kernel that has it not, or does not allow it now


def name_process(name: str) -> None:
    """Set the name of this process in lists of processes (on Linux). The kernel keeps 15 bytes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def launcher_is_gone() -> bool:
    """Whether `thinwire train` started this process, and has ended."""
    launcher = os.environ.get(variables.LAUNCHER)
    return launcher is not None and int(launcher) != os.getppid()


if __name__ == "__main__":
    end_with_parent()  # before anything large is imported
    from thinwire.launch import cli

    sys.exit(cli.main(sys.argv[1:]))
