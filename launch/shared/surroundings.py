"""What a process inherits from the one that started it, put right where it would break a run."""

from __future__ import annotations

import os
import signal
import sys
import threading


def put_right() -> None:
    """Open standard streams that are closed, print what a terminal cannot show as escapes, and get news of children.

    A file that is opened next takes the number of a closed stream, and gets what is printed. Where the parent ignores
    SIGCHLD, the kernel does not keep how a child ended.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - it stays open
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) == "strict":
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
