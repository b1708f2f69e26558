"""A process that ends where a plan says, with a writer of checkpoints that goes on only when it is told.

A moment is a point at which something may happen: a buffer is taken, a frame is sent or awaited, a file operation
begins. The writer of a checkpoint is a thread. Here it parks before each of its file operations, and the process lets
it go on between two of its own moments, so a seed gives the same order each time.
"""

import threading


class Crash(BaseException):
    """The process is gone at this point. No product code catches it."""


class Process:
    """One process.

    Args:
        draw: gives how far the writer of a checkpoint gets between two moments.
        crash_at: the moment at which it ends, counted from 1; None for never.

    Attributes:
        at_crash: called once, when it ends.
    """

    def __init__(self, draw, crash_at=None):
        self._draw, self._crash_at, self._writers = draw, crash_at, []
        self.at_crash = lambda: None
        self.moments = 0
        self.dead = False

    def moment(self):
        """One of the moments at which the process may end."""
        if self.dead:
            raise Crash
        self._take_turns()
        self.moments += 1
        if self.moments == self._crash_at:
            self.end()

    def end(self):
        """End the process: no other thread comes further."""
        self.dead = True
        self.at_crash()
        raise Crash

    def thread(self, target, args, name):
        """A writer, in place of `threading.Thread`."""
        writer = Writer(self, target, args, name)
        self._writers.append(writer)
        return writer

    def lock(self):
        """A lock, in place of `threading.Lock`."""
        return WaitingLock(self)

    def let_writers_go_on(self):
        """Let each writer come to its next moment."""
        for writer in self._writers:
            writer.go_on(1)

    def close(self):
        """Let every writer end: those of a dead process at once, others when all is written."""
        for writer in self._writers:
            writer.finish()

    def _take_turns(self):
        """Let the writer go on for a while; the writer itself waits to be let."""
        busy = [writer for writer in self._writers if not writer.finished]
        for writer in busy:
            if writer.is_current():
                writer.park()
            else:
                writer.go_on(self._draw.choice((0, 0, 1, 3)))
        if self.dead:
            raise Crash


class WaitingLock:
    """A lock for which a process waits by letting its writers go on: one of them parks while it has it."""

    def __init__(self, process):
        self._process, self._lock = process, threading.Lock()

    def __enter__(self):
        while not self._lock.acquire(blocking=False):
            self._process.let_writers_go_on()

    def __exit__(self, *error):
        self._lock.release()


class Writer:
    """A thread that parks at each moment until it is told to go on."""

    def __init__(self, process, target, args, name):
        self._process, self.name, self.finished = process, name, False
        self._target, self._args = target, args
        self._thread = threading.Thread(target=self._run, name=name)
        # plain locks, which are many times faster than semaphores: there are hundreds of turns a run
        self._permit, self._parked = threading.Lock(), threading.Lock()
        self._permit.acquire()
        self._parked.acquire()

    def start(self):
        """Run until the first moment."""
        self._thread.start()
        self._parked.acquire()

    def join(self):
        """Run to the end; a process that ends meanwhile ends the caller too."""
        self.finish()
        if self._process.dead:
            raise Crash

    def finish(self):
        """Run to the end."""
        while not self.finished:
            self.go_on(1)
        self._thread.join()

    def go_on(self, moments):
        """Run for some moments."""
        for _ in range(moments):
            if self.finished:
                return
            self._permit.release()
            self._parked.acquire()

    def is_current(self):
        """Whether this is the caller's own thread."""
        return threading.current_thread() is self._thread

    def park(self):
        """Wait to be told to go on."""
        self._parked.release()
        self._permit.acquire()

    def _run(self):
        try:
            self._target(*self._args)
        except Crash:
            pass
        finally:
            self.finished = True
            self._parked.release()
