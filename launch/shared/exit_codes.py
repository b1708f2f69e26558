"""Exit statuses: that of each kind of error, a sentence for that of another process, and a signal to one that runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from thinwire.errors import ThinwireError

OK = 0
FAILED = 1
"""The work began and failed."""
MISTAKE = 2
"""The user's mistake, found before any work began."""
SIGNALLED = 128
"""A signal stopped it: this and the number of the signal."""

UNREAD = 141
"""The reader of the output is gone: 128 and the number of SIGPIPE."""

FOR_MEMORY = (
    "(probably by the system, for want of memory: lower pipeline.microbatch_size, set training.recompute to block, or "
    "take a smaller model)"
)
"""What may have killed a process that ended by SIGKILL, and what to make smaller."""


class FailedError(ThinwireError, RuntimeError):
    """Work that began and failed."""


class StoppedError(ThinwireError):
    """Work that a signal stopped."""

    def __init__(self, mistakes: str | Iterable[str] = (), number: int = signal.SIGINT) -> None:
        super().__init__(mistakes)
        self.number = number


def status_of(error: ThinwireError) -> int:
    """The exit status of a command that ends with an error: FAILED for a RuntimeError that is no ValueError."""
    if isinstance(error, StoppedError):
        return SIGNALLED + error.number
    return FAILED if isinstance(error, RuntimeError) and not isinstance(error, ValueError) else MISTAKE


@contextmanager
def working() -> Iterator[None]:
    """Mark where work begins. A `CodecError`, for example, is a mistake before this line and a failure after it.

    OptionsError and ModelError stay mistakes: the recipe was already wrong before the work.
    """
    from thinwire.models.errors import ModelError
    from thinwire.pipeline.errors import OptionsError

    try:
        yield
    except (OptionsError, ModelError):
        raise
    except ThinwireError as error:
        if status_of(error) == MISTAKE:
            raise FailedError(error.mistakes) from error
        raise


def ended(returncode: int) -> str:
    """How a process ended, by its return code: a negative one is a signal's number."""
    if returncode < 0:
        said = f"was killed by {signal.Signals(-returncode).name}"
        return f"{said} {FOR_MEMORY}" if returncode == -signal.SIGKILL else said
    return f"exited with status {returncode or '0 before its run had ended; nothing that it runs may call os._exit'}"


class Running(Protocol):
    """A started process, in a session of its own so that only who started it gets Ctrl-C."""

    pid: int

    def poll(self) -> int | None:
        """Its return code; None while it runs."""

    def wait(self) -> int:
        """Wait until it has ended; its return code."""


def signal_group(process: Running, number: signal.Signals) -> None:
    """Send a signal to a process, and to all that it started in its session, while it runs."""
    if process.poll() is None:
        for send in (os.killpg, os.kill):  # a fork that has just begun has no session of its own yet
            with suppress(ProcessLookupError):
                send(process.pid, number)
                return
