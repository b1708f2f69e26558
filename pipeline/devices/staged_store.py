"""Feedback's buffers of a stage on a GPU that live in the host's memory or on disk: the rows come before their use.

    fetch   host store ─ reader thread ─► pinned rows ─ side stream ─► rows on the GPU ► borrow
    keep    rows on the GPU ─ side stream ─► pinned rows ─ writer thread ─► host store

The thread that launches kernels gives orders and never waits for the GPU. It waits for the host store where the rows
of a message were not announced, and where the rows of `MOST_WRITES` messages are still on their way back.

Rows move as the bytes that the host store keeps, so the GPU itself codes rows of fewer bits. The rules that keep both
sides consistent:

- The rows of one message are fetched ahead: those announced next. A fetch follows all earlier writes of its slots.
- A write to slots that were fetched ahead has them fetched again.
- A write leaves from a copy of its rows: later compute may change the rows themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from thinwire.compress.stores.store import Store
from thinwire.pipeline.devices.courier import Courier, promised
from thinwire.pipeline.devices.streams import CopyStream

MOST_WRITES = 16


@dataclass(frozen=True)
class RowLanes:
    """What moves rows; all stores of a process may share it."""

    stream: CopyStream
    """Copies rows, and no frames: a fetch waits until its memory on the GPU is free, and frames must not."""
    reader: Courier
    """Reads rows of host stores, in the order in which they are wanted."""
    writer: Courier
    """Waits for copies from the GPU, and writes them into host stores."""


@dataclass(frozen=True, eq=False)
class _Fetch:
    slots: tuple[int, ...]
    rows: Tensor
    """Memory on the GPU, with room for these slots at least."""
    copied: Future[torch.Event]
    """The moment when the rows are there, once their copy was ordered."""


class StagedStore(Store):
    """A store of the host, as compute on a GPU sees it.

    Args:
        host: keeps the rows; nothing else may use it.
        lanes: what moves them.
    """

    def __init__(self, host: Store, lanes: RowLanes) -> None:
        super().__init__(host.layout, lanes.stream.device)
        self._host, self._lanes = host, lanes
        self._announced: deque[tuple[int, ...]] = deque()
        self._ahead: _Fetch | None = None
        self._lent: Tensor | None = None
        self._free: deque[tuple[Tensor, torch.Event]] = deque()
        self._writes: deque[tuple[frozenset[int], Future[None]]] = deque()
        self._pinned: deque[Tensor] = deque()  # for writes; the writer gives back what this thread takes
        self._fetched: tuple[Tensor, torch.Event] | None = None  # the reader's pinned rows, and their last copy

    def restore(self, known: Tensor, rows: Iterable[tuple[list[int], Tensor]]) -> None:
        """Replace the content of the host store by saved rows."""
        self._drain()
        self._host.restore(known, rows)
        super().restore(known, ())

    def flush(self) -> None:
        """Wait until everything written is in the host store's medium."""
        self._drain()
        self._host.flush()

    def close(self) -> None:
        """Write what is pending, and close the host store."""
        try:
            self._drain()
        finally:
            self._host.close()

    def _expect(self, slots: list[int]) -> None:
        if slots:
            self._host._expect(slots)
            self._announced.append(tuple(slots))
            self._fetch_ahead()

    def _take(self, slots: list[int]) -> Tensor:
        """The rows on the GPU, for compute asked for until the next `_take`."""
        if self._lent is not None:  # its memory may be written after the compute asked for until now
            self._free.append((self._lent, self._lanes.stream.mark()))
            self._lent = None
        if self._ahead is None or self._ahead.slots != tuple(slots):
            self._forget()
            self._ahead = self._fetch(tuple(slots))
        fetch, self._ahead = self._ahead, None
        # compute waits for the rows, on the GPU; the host waits until their copy is ordered
        self._lanes.stream.hold_compute(fetch.copied.result())
        self._lent = fetch.rows
        self._fetch_ahead()
        return fetch.rows[: len(slots)]

    def _put(self, slots: list[int], rows: Tensor) -> None:
        written = frozenset(slots)
        if self._ahead is not None and not written.isdisjoint(self._ahead.slots):
            self._forget()
        while self._writes and (self._writes[0][1].done() or len(self._writes) >= MOST_WRITES):
            self._writes.popleft()[1].result()
        source, pinned = rows.clone(), self._to_pin(len(slots))
        copied = self._lanes.stream.copy(source, pinned[: len(slots)], after=self._lanes.stream.mark())
        job = partial(self._bring_back, slots, source, pinned, copied)
        self._writes.append((written, promised(self._lanes.writer, job)))

    def _load(self, slots: list[int]) -> Tensor:
        self._drain()
        return self._host._load(slots)

    def _capture(self, slots: list[int]) -> Iterator[Tensor]:
        self._drain()
        return self._host._capture(slots)

    def _release(self) -> None:
        self._host._release()

    def _fetch_ahead(self) -> None:
        if self._ahead is None and self._announced:
            self._ahead = self._fetch(self._announced.popleft())

    def _fetch(self, slots: tuple[int, ...]) -> _Fetch:
        rows, after = self._room(len(slots))
        earlier = [write for written, write in self._writes if not written.isdisjoint(slots)]
        return _Fetch(slots, rows, promised(self._lanes.reader, partial(self._bring, slots, rows, after, earlier)))

    def _bring(
        self, slots: tuple[int, ...], rows: Tensor, after: torch.Event, earlier: Iterable[Future[None]]
    ) -> torch.Event:
        """The reader's part of a fetch: the copy is ordered on return."""
        for write in earlier:
            write.result()
        read = self._host._take(list(slots))
        if self._fetched is not None:
            self._fetched[1].synchronize()
        if self._fetched is None or len(self._fetched[0]) < len(read):
            pinned = self._new_pinned(len(read))
        else:
            pinned = self._fetched[0]
        pinned[: len(read)] = read
        copied = self._lanes.stream.copy(pinned[: len(read)], rows[: len(read)], after)
        self._fetched = pinned, copied
        return copied

    def _bring_back(self, slots: list[int], source: Tensor, pinned: Tensor, copied: torch.Event) -> None:
        """The writer's part of a write; it holds `source` until its copy is done, for the GPU may use freed memory."""
        copied.synchronize()
        self._host._put(slots, pinned[: len(slots)])
        self._pinned.append(pinned)

    def _forget(self) -> None:
        """Give up what was announced: the messages come in another order, or the rows change. What is lent stays."""
        self._announced.clear()
        if self._ahead is not None:
            fetch, self._ahead = self._ahead, None
            self._lanes.stream.hold_compute(fetch.copied.result())
            self._free.append((fetch.rows, self._lanes.stream.mark()))

    def _drain(self) -> None:
        """Wait until the host store holds everything written that it can; raise what failed first on the way."""
        failures: list[Exception] = []
        waits = [self._forget, *(write.result for _, write in self._writes)]
        self._writes.clear()
        for wait in waits:
            try:
                wait()
            except Exception as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def _room(self, count: int) -> tuple[Tensor, torch.Event]:
        """Memory on the GPU for so many rows, and the moment from which on it may be written."""
        while self._free:
            rows, after = self._free.popleft()
            if len(rows) >= count:
                return rows, after
        rows = torch.empty(count, self.layout.row_bytes, dtype=torch.uint8, device=self.device)
        return rows, self._lanes.stream.mark()  # memory that compute has freed may be in use until now

    def _to_pin(self, count: int) -> Tensor:
        """Pinned memory for so many rows at least."""
        while self._pinned:
            pinned = self._pinned.popleft()
            if len(pinned) >= count:
                return pinned
        return self._new_pinned(count)

    def _new_pinned(self, count: int) -> Tensor:
        return torch.empty(count, self.layout.row_bytes, dtype=torch.uint8, pin_memory=self.device.type != "cpu")
