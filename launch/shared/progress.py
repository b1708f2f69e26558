"""Short messages on a terminal while a command prepares its work and has nothing else to show.

Other output is for programs, so it gets no such messages.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 2.0
"""Seconds before a message begins to count: most work is done by then."""
_REST_ERASED = "\x1b[K"
_COUNTER = "thinwire seconds"


def show(doing: str) -> bool:
    """Print what happens now, if the output is a terminal, in the first process alone; whether it is."""
    watched = sys.stdout.isatty() and os.environ.get("RANK", "0") == "0"
    if watched:
        print(f"{doing} ...", flush=True)
    return watched


@contextmanager
def showing(doing: str) -> Iterator[None]:
    """Print what happens inside, as `show` does. After some seconds, the line below counts them until the end."""
    with counting(show(doing)):
        yield


@contextmanager
def counting(shown: bool = True) -> Iterator[None]:
    """Inside, a line on the terminal counts the seconds. It is erased at the end, and its thread has ended then.

    Inside of another one this does nothing, because one line is enough.
    """
    if not (shown and sys.stdout.isatty()) or any(thread.name == _COUNTER for thread in threading.enumerate()):
        yield
        return
    ended = threading.Event()
    counter = threading.Thread(target=_count, args=(ended,), name=_COUNTER, daemon=True)
    counter.start()
    try:
        yield
    finally:
        ended.set()
        counter.join()


@contextmanager
def patient(sentence: str, seconds: float = 10.0) -> Iterator[None]:
    """Print a sentence on stderr if what is inside takes longer than so many seconds, once; also for programs."""
    timer = threading.Timer(seconds, print, [sentence], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _count(ended: threading.Event) -> None:
    started, written = time.monotonic(), False
    while not ended.wait(1.0 if written else PATIENCE):
        # back to the start of the line: whatever is printed next takes the place of the seconds
        print(f"... {time.monotonic() - started:.0f} s{_REST_ERASED}\r", end="", flush=True)
        written = True
    if written:
        print(_REST_ERASED, end="", flush=True)
