"""Messages at the receiving end: pieces go into the buffer of a posted receive, or wait until one is posted."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field

from thinwire.pipeline.processes.zeromq.packets import Piece, Stream


class Pending:
    """A transfer that is done, has failed, or still goes on.

    A message to send is done when each of its pieces is copied, or the other process has it; `left` are the others.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()
        self.error: str | None = None
        self.left = 0

    def wait(self, seconds: float) -> bool:
        """Wait; whether it ended in this time; `error` is the reason of a failure."""
        return self._ended.wait(seconds)

    @property
    def ended(self) -> bool:
        """Whether it is done, or failed."""
        return self._ended.is_set()

    def end(self, error: str | None = None) -> None:
        """End the transfer: done, or failed for a reason. Only the first call counts."""
        if not self.ended:
            self.error = error
            self._ended.set()

    def end_piece(self) -> None:
        """One piece is copied, or the other process has it."""
        self.left -= 1
        if self.left == 0:
            self.end()


@dataclass
class _Message:
    """One message: the pieces that have arrived, and the receive that waits for it."""

    left: int | None = None
    """The bytes that are missing; None before the first piece."""
    buffer: memoryview | None = None
    pending: Pending | None = None
    early: list[tuple[Piece, memoryview]] = field(default_factory=list)

    def take(self, piece: Piece, data: memoryview) -> None:
        """Store a piece, if a buffer for it is there."""
        if self.buffer is None or self.pending is None:
            self.early.append((piece, data))
            return
        left = piece.total if self.left is None else self.left
        self.left = left - len(data)
        if piece.total > len(self.buffer):
            self.pending.end(f"{piece.total} bytes came where {len(self.buffer)} at most are expected")
        elif piece.offset + len(data) > piece.total or self.left < 0:
            self.pending.end(f"pieces came that do not make a message of {piece.total} bytes")
        else:
            self.buffer[piece.offset : piece.offset + len(data)] = data
            if self.left == 0:
                self.pending.end()


class Mailbox:
    """The messages from one process."""

    def __init__(self) -> None:
        self._messages: dict[tuple[Stream, int], _Message] = defaultdict(_Message)
        self._posted: dict[Stream, int] = defaultdict(int)

    def post(self, stream: Stream, buffer: memoryview, pending: Pending) -> None:
        """Receive the stream's next message that no receive waits for into `buffer`; it may be shorter."""
        key = stream, self._posted[stream]
        self._posted[stream] += 1
        message = self._messages[key]
        message.buffer, message.pending = buffer, pending
        early, message.early = message.early, []
        for piece, data in early:
            message.take(piece, data)
        self._forget(key)

    def take(self, piece: Piece, data: memoryview) -> None:
        """Store a piece. A piece that no receive can use any more is dropped."""
        key = piece.stream, piece.number
        if key in self._messages or piece.number >= self._posted[piece.stream]:
            self._messages[key].take(piece, data)
            self._forget(key)

    def fail(self, reason: str) -> None:
        """End all posted receives."""
        for key, message in list(self._messages.items()):
            if message.pending is not None:
                message.pending.end(reason)
                self._forget(key)

    def _forget(self, key: tuple[Stream, int]) -> None:
        pending = self._messages[key].pending
        if pending is not None and pending.ended:
            del self._messages[key]
