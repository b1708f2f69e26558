"""The heartbeat of a stage process, which tells all who listen that it is not stopped and not stuck.

A thread beats twice a second, and at once when training begins or ends. The thread needs Python's lock (the GIL). torch
gives the lock away while it computes, so a long computation is no silence. A process that is stopped is silent, and so
is one in which something keeps the lock.

The launcher hears its processes through a pipe each, and kills a silent one. Where torchrun starts the processes,
neighbours hear each other (`neighbours.py`).

A process beats before it imports anything large, so this file uses the standard library only.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

VARIABLE = "THINWIRE_HEARTBEAT"
"""The file descriptor through which the launcher hears a stage process."""

EVERY = 0.5
"""Seconds between two beats."""

_LOOK = 0.05
"""Seconds between two looks at whether this process trains."""

TRAINING, NOT_TRAINING = b"t", b"n"
"""What the launcher reads."""


class Pulse:
    """The heartbeat of this process.

    Attributes:
        trains: says whether the first step is done and the last one is not.
    """

    def __init__(self) -> None:
        self.trains: Callable[[], bool] = lambda: False
        self._listeners: list[Callable[[bool], None]] = []
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def add(self, listener: Callable[[bool], None]) -> None:
        """Call `listener` at every beat, with whether this process trains. It must not wait."""
        self._listeners.append(listener)

    def _beat(self) -> None:
        while True:
            trains = self.trains()
            for listener in tuple(self._listeners):
                listener(trains)
            next_beat = time.monotonic() + EVERY
            while time.monotonic() < next_beat and self.trains() == trains:
                time.sleep(_LOOK)


def begin() -> Pulse:
    """Let this process beat, for its launcher if one listens."""
    pulse = Pulse()
    if VARIABLE in os.environ:
        descriptor = int(os.environ[VARIABLE])

        def tell(trains: bool) -> None:
            with suppress(OSError):  # a launcher that is stopped does not read, and the pipe is full some day
                os.write(descriptor, TRAINING if trains else NOT_TRAINING)

        pulse.add(tell)
    return pulse
