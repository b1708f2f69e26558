"""Ending with the launcher: a stage whose launcher is gone has nobody to tell, and must not go on by itself.

This is the first thing that a stage process does. Importing torch takes seconds, in which nothing else would notice; so
only the standard library is used here.
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


def end_with_parent() -> None:
    """Have the kernel send SIGTERM once the parent is gone (on Linux); end at once where it is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if launcher_is_gone():
        os._exit(STOPPED)


def launcher_is_gone() -> bool:
    """Whether `thinwire train` started this process and has ended since."""
    launcher = os.environ.get(VARIABLE)
    return launcher is not None and int(launcher) != os.getppid()
