"""End with the launcher: a stage must not go on alone when its launcher is gone.

A stage process does this first. Importing torch takes seconds, and nothing would notice a lost launcher in that time.
So this file uses the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

VARIABLE = "THINWIRE_LAUNCHER"
"""The launcher's pid, for the processes that `thinwire train` starts."""

STOPPED = 143
"""The status of a process that was told to stop."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def end_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent ends (on Linux). End at once if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if launcher_is_gone():
        os._exit(STOPPED)


def name_process(name: str) -> None:
    """What lists of processes call this one (on Linux), in 15 bytes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def launcher_is_gone() -> bool:
    """Whether `thinwire train` started this process, and has ended."""
    launcher = os.environ.get(VARIABLE)
    return launcher is not None and int(launcher) != os.getppid()
