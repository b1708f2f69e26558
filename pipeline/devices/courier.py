"""Who sends the frames of a GPU: a thread that waits for their copies, in order, so that no other thread has to."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from thinwire.pipeline.devices.device import make_current

T = TypeVar("T")


class Courier:
    """A thread for a device, which does jobs in the order in which they come.

    After a job that fails it does no other, unless a future got the failure. It ends with the process.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._device = device
        self._jobs: queue.Queue[tuple[Callable[[], Any], Future[Any] | None]] = queue.Queue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, job: Callable[[], T], future: Future[T] | None = None) -> None:
        """Take a job, and raise what an earlier one raised; a `future` gets what it returns, or why it was not done."""
        self._raise()
        if self._thread.ident is None:
            self._thread.start()
        self._jobs.put((job, future))

    def drain(self) -> None:
        """Wait until all jobs are done, and raise what one of them raised."""
        self._jobs.join()
        self._raise()

    def _run(self) -> None:
        try:
            make_current(self._device)
        except BaseException as failure:  # whoever waits for a job must get it
            self._failure = failure
        while True:
            job, future = self._jobs.get()
            try:
                if self._failure is not None:
                    raise self._failure
                done = job()
                if future is not None:
                    future.set_result(done)
            except BaseException as failure:
                if future is None:
                    self._failure = failure
                else:
                    future.set_exception(failure)
            finally:
                del job, future  # they hold buffers
                self._jobs.task_done()

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure


def promised(courier: Courier, work: Callable[[], T]) -> Future[T]:
    """The result of work that a courier does in its turn. What the work raises is raised by `Future.result` alone."""
    future: Future[T] = Future()
    courier.submit(work, future)
    return future
