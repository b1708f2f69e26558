"""A store in a file on the stage's own disk, which reads ahead and writes behind.

Two threads work between the caller and the file. The caller waits for the disk only if it reads a row that was not
prefetched, or writes faster than the disk for a long time:

    write ──► pending ──────────────────► writer ──► file       at most `pending_bytes`; then a write waits
    prefetch ──► wanted ──► reader ──► ready                    at most `ahead_bytes`; then the reader waits
    read ◄── ready, else pending, else the file

Each of these is a dict by slot, in order of arrival, behind one lock. The rules that keep them consistent:

- A slot's bytes are in `pending`, or else in the file. The writer removes a row from `pending` only after the file has
  it, and only if the slot was not written again meanwhile.
- A snapshot takes the rows in `pending` at once and reads the others (`asked`) from the file at any later time: the
  writer saves such a row (`kept`) before it overwrites it.
- A row in `ready` is what a read of the slot would give. So a write replaces it, and a row that the reader brings after
  such a write is dropped.
"""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from thinwire.compress.stores.slot_file import SlotFile
from thinwire.compress.stores.store import Store, StoreError, StoreLayout


class DiskStore(Store):
    """Rows in one file at `path`. Closing the store leaves the file there.

    The next call, and every call after it, raises an error that the disk had in the background. Rows may then be
    missing: go back to a checkpoint.

    The known slots are not in the file, so it is of use to this store alone.
    """

    def __init__(
        self,
        layout: StoreLayout,
        path: Path | str,
        *,
        pending_bytes: int = 64 << 20,
        ahead_bytes: int = 64 << 20,
        open_file: Callable[..., SlotFile] = SlotFile,
    ) -> None:
        """Hold at most `pending_bytes` on the way to the disk and `ahead_bytes` read ahead, or one row of each."""
        super().__init__(layout)
        self._file = open_file(Path(path), layout.nbytes)
        self._max_pending = max(1, pending_bytes // layout.row_bytes)
        self._max_ahead = max(1, ahead_bytes // layout.row_bytes)
        self._calls = threading.Lock()  # one caller at a time, held while waiting for the disk
        self._changed = threading.Condition()  # guards everything below, never held while waiting for the disk
        self._pending: dict[int, Tensor] = {}
        self._wanted: dict[int, int] = {}  # slot -> the call of prefetch that wants it
        self._reading: dict[int, int] = {}  # the same, for the slot that the reader reads now
        self._ready: dict[int, tuple[int, Tensor]] = {}  # the same, with its bytes
        self._asked: set[int] = set()  # slots whose rows in the file a snapshot still wants
        self._kept: dict[int, Tensor] = {}  # rows of a snapshot that are in memory
        self._prefetches = 0  # calls of prefetch so far
        self._reached = 0  # the last of them with a row that was read
        self._failure: StoreError | None = None
        self._reported = False
        self.closed = False
        """Whether `close` was called."""
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), name=f"{loop.__name__} {path}", daemon=True)
            for loop in (self._write_behind, self._read_ahead)
        ]
        for thread in self._threads:
            thread.start()

    def flush(self) -> None:
        """Wait until everything written is on the disk itself."""
        with self._calls:
            with self._changed:
                self._wait_for(lambda: not self._pending)
            self._do(self._file.sync)

    def close(self, timeout_seconds: float = 60.0) -> None:
        """Write what is pending, end both threads and close the file; raise a failure that no call has raised yet.

        Waits for the disk at most `timeout_seconds`.
        """
        with self._changed:
            if self.closed:
                return
            self.closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_seconds
        idle = self._calls.acquire(timeout=timeout_seconds)  # later calls raise StoreError
        if idle:
            self._calls.release()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if idle and not any(thread.is_alive() for thread in self._threads):
            self._file.close()
        else:
            # The file stays open: a thread may still use its number, which could soon belong to another file.
            self._fail(
                StoreError(
                    f"{self._file.path} did not answer within {timeout_seconds} s of closing; check the disk, then "
                    f"start the run again"
                )
            )
        if self._failure and not self._reported:
            raise self._report(self._failure)

    def _load(self, slots: list[int]) -> Tensor:
        return self._rows(slots, self._pending.get)

    def _take(self, slots: list[int]) -> Tensor:
        return self._rows(slots, self._take_one)

    def _rows(self, slots: list[int], in_memory: Callable[[int], Tensor | None]) -> Tensor:
        """The bytes of slots: those that are in memory, and the others from the file."""
        rows = torch.empty(len(slots), self.layout.row_bytes, dtype=torch.uint8)
        with self._calls:
            for slot, out in zip(slots, rows, strict=True):
                with self._changed:
                    self._require_usable()
                    row = in_memory(slot)
                if row is None:
                    self._do(partial(self._file.read, slot * self.layout.row_bytes, out))
                else:
                    out.copy_(row)
        return rows

    def _take_one(self, slot: int) -> Tensor | None:
        """Get a slot's bytes if they are in memory, and mark what was prefetched for it as used."""
        # Wait for the reader if it reads this row now: faster than reading it here again.
        self._wait_for(lambda: slot not in self._reading)
        call, row = self._ready.pop(slot, (0, None))
        if row is None:
            call, row = self._wanted.pop(slot, 0), self._pending.get(slot)
        self._reached = max(self._reached, call)
        self._changed.notify_all()
        return row

    def _put(self, slots: list[int], rows: Tensor) -> None:
        with self._calls:
            for slot, row in zip(slots, rows, strict=True):
                self._put_one(slot, row.clone())

    def _put_one(self, slot: int, row: Tensor) -> None:
        with self._changed:
            self._wait_for(lambda: slot in self._pending or len(self._pending) < self._max_pending)
            self._pending[slot] = row
            if slot in self._ready:
                self._ready[slot] = (self._ready[slot][0], row)
            elif slot in self._reading:
                self._ready[slot] = (self._reading.pop(slot), row)
            elif slot in self._wanted and self._has_room():
                self._make_room()
                self._ready[slot] = (self._wanted.pop(slot), row)
            self._changed.notify_all()

    def _expect(self, slots: list[int]) -> None:
        with self._changed:
            self._require_usable()
            self._prefetches += 1
            for slot in slots:
                if slot in self._ready:
                    self._ready[slot] = (self._prefetches, self._ready.pop(slot)[1])
                else:
                    (self._reading if slot in self._reading else self._wanted)[slot] = self._prefetches
            self._changed.notify_all()

    def _capture(self, slots: list[int]) -> Iterator[Tensor]:
        with self._calls, self._changed:
            self._require_usable()
            assert not self._asked and not self._kept, "the snapshot before is still being read"
            self._kept = {slot: self._pending[slot] for slot in slots if slot in self._pending}
            self._asked = set(slots) - self._kept.keys()
        return (self._captured(slot) for slot in slots)

    def _release(self) -> None:
        with self._changed:
            self._asked, self._kept = set(), {}

    def _captured(self, slot: int) -> Tensor:
        """A row of the snapshot. The file is read first: if the writer overwrote it since, it kept the old row."""
        row = torch.empty(self.layout.row_bytes, dtype=torch.uint8)
        with self._changed:
            asked = slot in self._asked
        if asked:
            self._do(lambda: self._file.read(slot * self.layout.row_bytes, row))
        with self._changed:
            self._asked.discard(slot)
            return self._kept.pop(slot, row)

    def _keep_for_snapshot(self, slot: int) -> None:
        """Keep the file's row if a snapshot wants it; only the writer calls this, before it writes the slot."""
        with self._changed:
            if slot not in self._asked:
                return
        row = torch.empty(self.layout.row_bytes, dtype=torch.uint8)
        self._file.read(slot * self.layout.row_bytes, row)
        with self._changed:
            if slot in self._asked:
                self._asked.remove(slot)
                self._kept[slot] = row

    def _write_behind(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self.closed or self._failure)
                if self._failure or not self._pending:
                    return
                slot, row = next(iter(self._pending.items()))
            self._keep_for_snapshot(slot)
            self._file.write(slot * self.layout.row_bytes, row)
            with self._changed:
                if self._pending[slot] is row:
                    del self._pending[slot]
                self._changed.notify_all()

    def _read_ahead(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: (self._wanted and self._has_room()) or self.closed or self._failure)
                if self.closed or self._failure:
                    return
                slot = next(iter(self._wanted))
                call, row = self._wanted.pop(slot), self._pending.get(slot)
                self._make_room()
                if row is not None:
                    self._ready[slot] = (call, row)
                    continue
                self._reading[slot] = call
            row = torch.empty(self.layout.row_bytes, dtype=torch.uint8)
            self._file.read(slot * self.layout.row_bytes, row)
            with self._changed:
                if slot in self._reading:
                    self._ready[slot] = (self._reading.pop(slot), row)
                self._changed.notify_all()

    def _has_room(self) -> bool:
        if len(self._ready) + len(self._reading) < self._max_ahead:
            return True
        # the oldest ready row may go if it was skipped: rows of a later prefetch are already in use
        return bool(self._ready) and next(iter(self._ready.values()))[0] < self._reached

    def _make_room(self) -> None:
        if len(self._ready) + len(self._reading) >= self._max_ahead:
            del self._ready[next(iter(self._ready))]

    def _run(self, loop: Callable[[], None]) -> None:
        """Run one thread's loop; keep an error that ends it for the next call, so no caller waits for the thread."""
        try:
            loop()
        except StoreError as error:
            self._fail(error)
        except Exception as error:
            self._fail(StoreError(f"the store in {self._file.path} failed: {error!r}"), error)

    def _do(self, access: Callable[[], None]) -> None:
        """Access the file from the caller's thread; a failure is treated like one in the background."""
        try:
            access()
        except StoreError as error:
            self._fail(error)
            self._reported = True
            raise

    def _fail(self, failure: StoreError, cause: Exception | None = None) -> None:
        failure.__cause__ = failure.__cause__ or cause
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self.closed or self._failure or condition())
        self._require_usable()

    def _require_usable(self) -> None:
        if self._failure:
            raise self._report(self._failure)
        if self.closed:
            raise StoreError(f"the store in {self._file.path} is closed")

    def _report(self, failure: StoreError) -> StoreError:
        """A new exception with the same text: an exception that is raised twice has both tracebacks."""
        self._reported = True
        again = StoreError(failure.mistakes)
        again.__cause__ = failure.__cause__
        return again
