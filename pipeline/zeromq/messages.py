"""Messages at the receiving end: pieces go into the buffer of a posted receive, or wait until one is posted."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field

from thinwire.pipeline.zeromq.packets import Channel, Piece


class Pending:
    """Something under way: done, failed, or neither yet."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self.error: str | None = None

    def wait(self, seconds: float) -> bool:
        """Whether it ended within so many seconds; `error` says how."""
        return self._ended.wait(seconds)

    @property
    def ended(self) -> bool:
        """Whether it is done, or failed."""
        return self._ended.is_set()

    def end(self, error: str | None = None) -> None:
        """It is done; or has failed, with the reason. Only the first end counts."""
        if not self.ended:
            self.error = error
            self._ended.set()


@dataclass
class _Message:
    """One message, as far as it has arrived or is waited for."""

    left: int | None = None
    """Bytes that are still to come; None before the first piece."""
    buffer: memoryview | None = None
    pending: Pending | None = None
    early: list[tuple[Piece, memoryview]] = field(default_factory=list)

    def take(self, piece: Piece, data: memoryview) -> None:
        """Take a piece in, if there is where to put it."""
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
        self._messages: dict[tuple[Channel, int], _Message] = defaultdict(_Message)
        self._posted: dict[Channel, int] = defaultdict(int)

    def post(self, channel: Channel, buffer: memoryview, pending: Pending) -> None:
        """Have the next message of a channel that was not asked for yet written into `buffer`; it may be shorter."""
        key = channel, self._posted[channel]
        self._posted[channel] += 1
        message = self._messages[key]
        message.buffer, message.pending = buffer, pending
        early, message.early = message.early, []
        for piece, data in early:
            message.take(piece, data)
        self._forget(key)

    def take(self, piece: Piece, data: memoryview) -> None:
        """Take a piece in. What no receive can make use of any more is dropped."""
        key = piece.channel, piece.number
        if key in self._messages or piece.number >= self._posted[piece.channel]:
            self._messages[key].take(piece, data)
            self._forget(key)

    def fail(self, reason: str) -> None:
        """End all receives that are posted."""
        for key, message in list(self._messages.items()):
            if message.pending is not None:
                message.pending.end(reason)
                self._forget(key)

    def _forget(self, key: tuple[Channel, int]) -> None:
        pending = self._messages[key].pending
        if pending is not None and pending.ended:
            del self._messages[key]
