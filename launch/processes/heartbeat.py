"""Heartbeats: a stage process that is stopped or stuck is noticed by its silence, long before `wire.timeout`.

A thread beats twice a second, and at once when the process does something else. A beat says what it does: a process
that imports libraries or builds its stages may be silent longer than one that trains. The thread needs Python's lock
(the GIL). torch gives the lock away while it computes, so a long computation is no silence. A process that is stopped
is silent, and so is one in which something keeps the lock.

Who is on the same host reads heartbeats through a pipe (`Hearing`), and kills a silent process: its launcher, or, where
torchrun has started it, a watcher, forked from it. Processes of torchrun also read those of their neighbours, on any
host (`neighbours.py`), and end: torchrun does not notice silence. It then asks the silent one to end, and waits 30 s
before it kills it.

A process that trains may be silent for `wire.heartbeat`. Before its first step and after its last it may be silent for
`wire.timeout`, because libraries keep the lock while they are loaded, and on a busy machine, or from a disk far away,
that takes minutes. A process that the system calls stopped gets no such time. Its launcher waits for half of
`wire.heartbeat` only: the system knows a stop from long work.

A process beats, and its watcher is forked, before it imports anything large. So this file uses the standard library
only.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from thinwire.launch.processes import parent
from thinwire.launch.shared.doing import Doing

VARIABLE = "THINWIRE_HEARTBEAT"
"""The file descriptor through which the launcher reads the heartbeat of a stage process."""

EVERY = 0.5
"""Seconds between two beats."""

_LOOK = 0.05
"""Seconds between two looks at what this process does."""

NAME = "thinwire-watch"
"""The name of a watcher in lists of processes."""
_LONGER = 2.0
"""Seconds that a watcher waits longer than neighbours."""


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


_IN_WORDS = {
    Doing.IMPORTING: "importing libraries",
    Doing.READING: "reading its data and its model",
    Doing.BUILDING: "building its stages, or taking the first step",
    Doing.ENDING: "ending, after the last step",
}


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


@dataclass
class Silence:
    """How long each of several processes has been silent."""

    heartbeat: float
    """Seconds for which a process that trains may be silent."""
    timeout: float
    """Seconds for any other, if they are more."""
    clock: Callable[[], float] = time.monotonic
    """The time in seconds."""
    _: KW_ONLY
    stopped: float = 1.0
    """The share of `heartbeat` for which a stopped process may be silent."""
    longer: float = 0.0
    """Seconds that are waited beyond all of these."""

    def __post_init__(self) -> None:
        self._heard: dict[int, tuple[float, Doing]] = {}
        self._looked = self.clock()

    def received(self, rank: int, doing: Doing) -> None:
        """Note a beat of a process, and what it does."""
        self._heard[rank] = (self.clock(), doing)

    def forget(self, rank: int) -> None:
        """Expect no more beats of a process."""
        self._heard.pop(rank, None)

    def too_long(self, is_stopped: Callable[[int], bool] = lambda rank: False) -> dict[int, str]:
        """What is wrong with every process that has been silent for too long, by rank: a sentence without subject."""
        now, stopped = self.clock(), self.stopped * self.heartbeat
        passed = now - self._looked
        if passed > 2 * EVERY:  # this process had no turn itself, so it could read nothing: that time does not count
            self._heard = {rank: (min(now, last + passed), doing) for rank, (last, doing) in self._heard.items()}
        self._looked = now
        found = {}
        for rank, (last, doing) in self._heard.items():
            seconds = now - last
            if seconds > self._limit(doing) + self.longer:
                found[rank] = self._sentence(seconds, doing)
            elif seconds > stopped + self.longer and is_stopped(rank):
                found[rank] = (
                    f"is stopped, as by SIGSTOP or a debugger, and sent no heartbeat for {seconds:.1f} s; "
                    f"wire.heartbeat of {self.heartbeat:g} s allows {stopped:g} s to a stopped process"
                )
        return found

    def _limit(self, doing: Doing) -> float:
        return self.heartbeat if doing is Doing.TRAINING else max(self.heartbeat, self.timeout)

    def _sentence(self, seconds: float, doing: Doing) -> str:
        """What silence means, and which option allows more of it."""
        if doing is Doing.TRAINING:
            return (
                f"sent no heartbeat for {seconds:.1f} s, and wire.heartbeat allows {self.heartbeat:g} s: the process "
                f"is stopped, or something keeps Python's lock (the GIL), or the host or the link is gone"
            )
        return (
            f"sent no heartbeat for {seconds:.1f} s while it was {_IN_WORDS[doing]}, and wire.timeout allows "
            f"{self._limit(doing):g} s for that; if the machine or its disk is so slow, raise --wire.timeout"
        )


class Hearing:
    """The heartbeats of processes of this host, as another process reads them; `silence` says what is too long."""

    def __init__(self, silence: Silence) -> None:
        self._silence, self._pipes = silence, dict[int, int]()

    @contextmanager
    def beginning(self, rank: int, doing: Doing) -> Iterator[str]:
        """The value of `VARIABLE` for a process that begins inside, so that its heartbeat is read."""
        self._pipes[rank], writing = os.pipe()
        for descriptor in (self._pipes[rank], writing):
            os.set_blocking(descriptor, False)
        self._silence.received(rank, doing)
        try:
            yield str(writing)
        finally:
            os.close(writing)

    def wait(self, seconds: float) -> None:
        """Wait for a beat, or the end of a process, so long at most."""
        select.select([*self._pipes.values()], [], [], seconds)

    def silent(self, pids: Mapping[int, int]) -> dict[int, str]:
        """What is wrong with every process that has been silent for too long, of those with these pids."""
        for rank, pipe in self._pipes.items():
            with suppress(BlockingIOError):
                if beats := os.read(pipe, 1 << 16):
                    self._silence.received(rank, Doing(beats[-1:]))
            if rank not in pids:
                self._silence.forget(rank)
        return self._silence.too_long(lambda rank: is_stopped(pids[rank]))

    def close(self) -> None:
        """Read no heartbeats any more."""
        for pipe in self._pipes.values():
            os.close(pipe)


def is_stopped(pid: int) -> bool:
    """Whether the system has stopped a process, as after SIGSTOP or in a debugger; False where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def begin_watcher(heartbeat: float, timeout: float) -> None:
    """Have a watcher read this process's heartbeat, which must begin after this call.

    It waits 2 s longer than the neighbours, so they are the first to say who is silent.
    """
    rank, watched = int(os.environ["RANK"]), os.getpid()
    hearing = Hearing(Silence(heartbeat, timeout, longer=_LONGER))
    with hearing.beginning(rank, Doing.IMPORTING) as heard:
        if os.fork():
            hearing.close()
            os.environ[VARIABLE] = str(os.dup(int(heard)))
            return
    try:
        parent.name_process(NAME)
        for number in (signal.SIGTERM, signal.SIGINT):  # they are for the watched process, which may stay silent
            signal.signal(number, signal.SIG_IGN)
        _watch(watched, rank, hearing)
    finally:
        os._exit(0)


def _watch(watched: int, rank: int, hearing: Hearing) -> None:
    """Watch until the process has ended, or kill it for its silence."""
    while os.getppid() == watched:
        hearing.wait(EVERY)
        for said in hearing.silent({rank: watched}).values():
            os.kill(watched, signal.SIGKILL)  # before it is reported: the terminal may be gone
            os.write(2, f"process {rank} {said}; it was killed\n".encode())
            return
