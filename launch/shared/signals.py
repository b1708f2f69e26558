"""Signals that are noted, and answered at a place that is safe."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def gathered_signals() -> Iterator[list[signal.Signals]]:
    """Collect signals instead of ending at once, so that nothing stays half done.

    SIGHUP counts only if no signal came before: the kernel and the shell both send it when a terminal closes, perhaps
    after Ctrl-C, and nobody meant to hurry. If it is ignored, as after `nohup`, it stays so.
    """
    came: list[signal.Signals] = []

    def note(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP or not came:
            came.append(signal.Signals(number))

    wanted = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in wanted}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
