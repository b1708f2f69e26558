"""The watcher of a stage process under torchrun: a small process beside it, which kills it if it is silent.

torchrun does not notice silence. When a neighbour of a silent process has ended, torchrun asks the silent one to end,
and waits 30 s before it kills it. The watcher kills it, on whatever host it is, as the launcher of `thinwire train`
does. It waits 2 s longer than the neighbours, so they are the first to say who is silent.

It is forked before anything large is imported, so it takes little memory.
"""

from __future__ import annotations

import os
import select
import signal

from thinwire.launch.run import parent
from thinwire.launch.run.heartbeat.pulse import EVERY, VARIABLE, Doing
from thinwire.launch.run.heartbeat.silence import Silence, is_stopped

NAME = "thinwire-watch"
"""The name of a watcher in lists of processes."""
_LONGER = 2.0
"""Seconds that a watcher waits longer than neighbours."""


def begin(heartbeat: float, timeout: float) -> None:
    """Have a watcher read this process's pulse, which must begin after this call.

    Args:
        heartbeat, timeout: seconds, as `Silence` takes them.
    """
    reading, writing = os.pipe()
    watched = os.getpid()
    if os.fork():
        os.close(reading)
        os.set_blocking(writing, False)
        os.environ[VARIABLE] = str(writing)
        return
    try:
        os.close(writing)
        parent.name_process(NAME)
        for number in (signal.SIGTERM, signal.SIGINT):  # they are for the watched process, which may stay silent
            signal.signal(number, signal.SIG_IGN)
        _watch(watched, reading, Silence(heartbeat, timeout, longer=_LONGER))
    finally:
        os._exit(0)


def _watch(watched: int, reading: int, silence: Silence) -> None:
    """Watch until the process has ended, or kill it for its silence."""
    rank = int(os.environ["RANK"])
    silence.received(rank, Doing.IMPORTING)
    while os.getppid() == watched:
        if select.select([reading], [], [], EVERY)[0]:
            beats = os.read(reading, 1 << 12)
            if not beats:
                return
            silence.received(rank, Doing(beats[-1:]))
        for said in silence.too_long(lambda rank: is_stopped(watched)).values():
            os.kill(watched, signal.SIGKILL)  # before it is reported: the terminal may be gone
            os.write(2, f"process {rank} {said}; it was killed\n".encode())
            return
