"""How a process ended, in the numbers that shells know and in words."""

from __future__ import annotations

import signal


def ended(returncode: int) -> str:
    """How a process ended, by its return code: a negative one is a signal's number."""
    if returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"exited with status {returncode}"
