"""The thread that owns all ZeroMQ sockets of a process group. Only one thread may use them."""

from __future__ import annotations

import os
import sched
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from math import ceil
from queue import Empty, SimpleQueue
from typing import Any

import zmq

Socket = zmq.Socket[bytes]
Handler = Callable[[], None]
_READABLE = int(zmq.POLLIN)
_GLANCE = 0.05
"""Seconds between two looks at whether the thread lives."""


class Loop(threading.Thread):
    """Calls the handler of a socket when there is something to read from it, and runs the calls that others ask for.

    Calls that were asked for before it starts come first.

    Args:
        name: the name of the thread.
        failed: called in the thread, if it must end because a handler raised. Calls that were asked for come after it.
        ended: called in the thread when it ends for any reason.
    """

    def __init__(self, name: str, failed: Callable[[BaseException], None], ended: Handler) -> None:
        super().__init__(name=name, daemon=True)
        self._failed, self._ended = failed, ended
        self._poller, self._handlers = zmq.Poller(), dict[Any, Handler]()
        self._asked: SimpleQueue[Handler] = SimpleQueue()
        self._planned = sched.scheduler(time.monotonic)
        self._woken, self._wake = os.pipe()
        for descriptor in (self._woken, self._wake):
            os.set_blocking(descriptor, False)
        self._poller.register(self._woken, zmq.POLLIN)
        self._handlers[self._woken] = self._do_what_was_asked
        self._running = True

    def ask(self, handler: Handler) -> None:
        """Ask for a call in the thread. Any thread may ask; calls run in the order of asking."""
        self._asked.put(handler)
        with suppress(BlockingIOError):  # a full pipe wakes the thread too
            os.write(self._wake, b"\0")

    def later(self, seconds: float, handler: Handler) -> None:
        """Call `handler` after this time. Call this in the thread, or before it starts."""
        self._planned.enter(seconds, 0, handler)

    def catch_up(self, seconds: float) -> None:
        """Wait until all calls that were asked for are made, or the thread has ended, or for this time."""
        done, deadline = threading.Event(), time.monotonic() + seconds
        self.ask(done.set)
        while not done.wait(_GLANCE) and self.is_alive() and time.monotonic() < deadline:
            pass

    def stop(self) -> None:
        """End the thread after this handler. Call it in the thread only."""
        self._running = False

    def watch(self, socket: Socket, handler: Handler) -> None:
        """Call `handler` when there is something to read. Call this in the thread, or before it starts."""
        self._poller.register(socket, zmq.POLLIN)
        self._handlers[socket] = handler

    def forget(self, socket: Socket) -> None:
        """Stop what `watch` began. Call it in the thread only."""
        self._poller.unregister(socket)
        del self._handlers[socket]

    def run(self) -> None:
        """What the thread does until it is stopped, or a handler raises."""
        try:
            while self._running:
                pause = self._planned.run(blocking=False)
                for source, _ in self._poller.poll(None if pause is None else ceil(1e3 * pause)):
                    # a handler may have closed another one's socket
                    if (handler := self._handlers.get(source)) is not None:
                        handler()
        except BaseException as error:
            self._failed(error)
            self._do_what_was_asked()
        finally:
            self._ended()

    def _do_what_was_asked(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._woken, 1 << 16)
        with suppress(Empty):
            while True:
                self._asked.get_nowait()()


def received(socket: Socket) -> list[list[zmq.Frame]]:
    """All messages that can be read from a socket now, each as its parts."""
    messages = []
    with suppress(zmq.Again):  # a connection may break between the question and the reading
        # ask, because an exception at the end of every reading costs more than a message
        while int(socket.get(zmq.EVENTS)) & _READABLE:
            messages.append(_message(socket))
    return messages


def _message(socket: Socket) -> list[zmq.Frame]:
    """One message as its parts; a part knows whether another one follows."""
    parts = [socket.recv(zmq.NOBLOCK, copy=False)]
    while parts[-1].more:
        parts.append(socket.recv(zmq.NOBLOCK, copy=False))
    return parts
