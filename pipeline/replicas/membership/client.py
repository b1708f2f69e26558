"""The connection of a process to the membership server, over which both send each other messages.

A process listens nowhere. What the server sends comes back over the connection that the process has opened, and over
the next one if it breaks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from thinwire.pipeline.errors import PeerError, WireError
from thinwire.pipeline.processes.zeromq.connections import Patience, Standing
from thinwire.pipeline.processes.zeromq.keys import Keys
from thinwire.pipeline.processes.zeromq.mesh import ANY_LIFE, Address, Mesh, Taking
from thinwire.pipeline.replicas.membership.messages import Kinds, Message, check, pack, unpack

SERVER = 0
"""The number of the server in a mesh."""
PIECE_BYTES = 1 << 14
"""The most bytes of a piece: one must arrive within the time of a heartbeat, with what others send over its link."""
_EVERY = 0.25
"""Seconds from one heartbeat to the next."""
LATE = 1.0
"""Seconds between two looks after which this process had no turn itself, so it could read nothing."""
_LAST = 5.0
"""Seconds for which a client waits at its end for the server to take one more piece."""
_GRACE = 10.0
"""Seconds for which a stage process that has lost the server waits: its launcher sees it too, says why, and ends it."""
_ANY_LENGTH = 1 << 62


@dataclass(frozen=True)
class Ending:
    """Why a client is without a server for good."""

    text: str
    lasting: bool
    """Whether to start again would not help."""


class Client:
    """A process that exchanges messages with the membership server.

    Args:
        place: HOST:PORT where the server listens.
        keys: those of the run.
        heartbeat: seconds of silence after which it connects again.
        timeout: seconds without a server after which it gives up.
        kinds: the messages that it may get.
        take: gets them, in the thread of the mesh; None if `ask` gets them.
        report: prints a sentence for the user.
    """

    def __init__(
        self,
        place: str,
        keys: Keys,
        heartbeat: float,
        timeout: float,
        kinds: Kinds,
        take: Callable[[Message], None] | None = None,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._place, self._heartbeat, self._timeout = place, heartbeat, timeout
        self._kinds, self._report = kinds, report
        self._answers: SimpleQueue[Message] = SimpleQueue()
        self._give = take or self._answers.put
        self._moved, self._is_silent = time.monotonic(), False
        self._looked = self._moved
        self._ending: Ending | None = None
        self._mesh = Mesh(
            secrets.randbits(32),
            keys,
            interface=None,
            patience=Patience(heartbeat=heartbeat / 3, silence=heartbeat, gone=timeout, farewell=0.0),
            piece_bytes=PIECE_BYTES,
            taking=Taking(self._take, self._lose, _ANY_LENGTH),
        )
        self._mesh.add_addresses({SERVER: Address(f"tcp://{place}", ANY_LIFE)})
        self._mesh.ask(self._look)

    @property
    def ending(self) -> Ending | None:
        """Why there is no server any more; None while there is one, or one is waited for."""
        broken = self._mesh.broken
        return self._ending or (None if broken is None else Ending(broken, lasting=True))

    def later(self, seconds: float, handler: Callable[[], None]) -> None:
        """Call `handler` in the thread of the mesh, after this time."""
        self._mesh.ask(lambda: self._mesh.later(seconds, handler))

    def send(self, words: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """Send a message, now or as soon as there is a connection."""
        data = pack(words, blobs)
        self._mesh.ask(lambda: self._mesh.give(SERVER, data))

    def ask(self, words: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> Message:
        """Send a message, and wait for the answer. PeerError if there is no server any more."""
        self.send(words, blobs)
        while True:
            try:
                return self._answers.get(timeout=_EVERY)
            except Empty:
                if (ending := self.ending) is not None:
                    time.sleep(_GRACE)
                    raise PeerError(ending.text) from None

    def close(self, report: Callable[[str], None] = lambda text: None) -> None:
        """Leave when the server has all messages; it takes as long as the server takes them, and that is printed."""
        left, deadline = self.left, time.monotonic() + _LAST
        if left * PIECE_BYTES > 1 << 20:
            report(f"the membership server takes the last {left * PIECE_BYTES / 2**20:.0f} MiB of this replica")
        while left and self.ending is None and time.monotonic() < deadline:
            time.sleep(_EVERY / 5)
            if self.left < left:
                left, deadline = self.left, time.monotonic() + _LAST
        self._mesh.close()

    @property
    def left(self) -> int:
        """Pieces that were sent, and that the server does not have."""
        self._mesh.catch_up()
        connection = self._mesh.connection(SERVER)
        return 0 if connection is None else connection.left

    def end(self, text: str) -> None:
        """Give the server up for good, for a reason."""
        self._ending = self._ending or Ending(text, lasting=True)

    def _take(self, sender: int, data: bytes) -> None:
        try:
            message = unpack(data)
            check(message, self._kinds)
        except WireError as error:
            self.end(f"the membership server at {self._place} sent an invalid message: {error}")
        else:
            self._give(message)

    def _lose(self, server: int, reason: str) -> None:
        text = f"the membership server at {self._place} refuses this replica, which starts again: {reason}"
        self._ending = self._ending or Ending(text, lasting=False)

    def _look(self) -> None:
        """Send a heartbeat, and see whether the server can still be reached."""
        if (connection := self._mesh.connection(SERVER)) is not None:
            connection.beat()
            now = time.monotonic()
            if now - self._looked > LATE:
                self._moved = now
            self._looked = now
            is_ready = connection.state is Standing.READY
            # a greeting is short: it comes over a link on which no piece arrives in time
            holds = (
                is_ready and not connection.left and now - connection.since > min(self._heartbeat, self._timeout / 2)
            )
            self._moved = now if holds else max(self._moved, connection.moved)
            if is_ready:
                self._is_silent = False
            elif now - connection.since > self._heartbeat and not self._is_silent:
                self._is_silent = True
                self._report(
                    f"nothing comes from the membership server at {self._place}; this replica waits for it up to "
                    f"{self._timeout:g} s"
                )
            if now - self._moved > self._timeout:
                self.end(self._given_up(is_ready or connection.greeted))
        self._mesh.later(_EVERY, self._look)

    def _given_up(self, answers: bool) -> str:
        waited = f"for {self._timeout:g} s (wire.timeout)"
        if answers:
            return (
                f"the membership server at {self._place} answered, and nothing else arrived {waited}: the link must "
                f"carry {PIECE_BYTES >> 10} KiB within wire.heartbeat, which is {self._heartbeat:g} s; raise it"
            )
        return (
            f"the membership server at {self._place} did not answer {waited}; start it with the same keys, then this "
            f"replica again"
        )
