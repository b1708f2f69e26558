"""The heartbeat of a stage process, which shows all who listen that it is not stopped and not stuck.

A thread beats twice a second, and at once when the process does something else. A beat says what it does: a process
that imports libraries or builds its stages may be silent longer than one that trains. The thread needs Python's lock
(the GIL). torch gives the lock away while it computes, so a long computation is no silence. A process that is stopped
is silent, and so is one in which something keeps the lock.

The launcher reads the heartbeats of its processes through a pipe each, and kills a silent one. Where torchrun
starts the processes, neighbours read each other's (`neighbours.py`).

A process beats before it imports anything large, so this file uses the standard library only.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum

VARIABLE = "THINWIRE_HEARTBEAT"
"""The file descriptor through which the launcher reads the heartbeat of a stage process."""

EVERY = 0.5
"""Seconds between two beats."""

_LOOK = 0.05
"""Seconds between two looks at what this process does."""


class Doing(Enum):
    """What a process does; the value is what a beat carries."""

    IMPORTING = b"i"
    READING = b"r"
    BUILDING = b"b"
    """Its stages; until the first step is done."""
    TRAINING = b"t"
    ENDING = b"e"
    """After the last step."""


class Pulse:
    """The heartbeat of this process.

    Attributes:
        doing: says what this process does.
    """

    def __init__(self) -> None:
        self.doing: Callable[[], Doing] = lambda: Doing.IMPORTING
        self._listeners: list[Callable[[Doing], None]] = []
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def add(self, listener: Callable[[Doing], None]) -> None:
        """Call `listener` at every beat, with what this process does. It must not wait."""
        self._listeners.append(listener)

    def _beat(self) -> None:
        while True:
            doing = self.doing()
            for listener in tuple(self._listeners):
                listener(doing)
            next_beat = time.monotonic() + EVERY
            while time.monotonic() < next_beat and self.doing() is doing:
                time.sleep(_LOOK)


def begin() -> Pulse:
    """Let this process beat, for its launcher if one listens."""
    pulse = Pulse()
    if VARIABLE in os.environ:
        descriptor = int(os.environ[VARIABLE])

        def show(doing: Doing) -> None:
            with suppress(OSError):  # a launcher that is stopped does not read, and the pipe is full some day
                os.write(descriptor, doing.value)

        pulse.add(show)
    return pulse
