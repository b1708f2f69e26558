"""The meeting place of replicas on several hosts, without its socket: who is there, and who may come.

What it hears of a replica goes to the same rules as on one machine. A replica that is silent for too long is lost. A
gate that finds its way back before that goes on as if nothing had happened; later it is told to come anew.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.launch.run.crews.distant.agreement import difference
from thinwire.launch.run.crews.distant.line import (
    ACK,
    HELLO,
    LAUNCHER,
    PIECE,
    REFUSAL,
    UNKNOWN,
    VERSION,
    WELCOME,
    Line,
    pack,
    pack_words,
    unpack,
)
from thinwire.launch.run.heartbeat.silence import Silence
from thinwire.pipeline.errors import WireError
from thinwire.pipeline.replicas.membership.meeting import Meeting, named
from thinwire.pipeline.replicas.membership.messages import Message

NO_MESSAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What JSON of another shape than that of a message raises where it is read."""


@dataclass(frozen=True)
class Size:
    """What the hall must know of a run."""

    replicas: int
    processes: int
    """Of each replica."""
    timeout: float
    """Seconds that replicas wait for each other."""
    silence: float
    """Seconds of silence after which a replica is lost."""


@dataclass
class Guest:
    """A replica that is there."""

    life: str
    """Drawn by its gate."""
    line: Line
    route: bytes
    """What the socket calls its connection."""
    hearing: asyncio.Task[None]
    has_ended: bool = False


class Hall:
    """The meeting place. Create it where an event loop runs.

    Args:
        size: what it knows of the run.
        agreed: what all replicas must agree on.
        send: sends the parts of a packet over a connection.
        tell: tells the user a sentence.
        clock: the time in seconds.
    """

    def __init__(
        self,
        size: Size,
        agreed: Mapping[str, str],
        send: Callable[[bytes, list[bytes]], None],
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._size, self._agreed, self._send, self._tell, self._clock = size, agreed, send, tell, clock
        self._learned: dict[str, str] = {}  # what those who are there agree on, and the hall cannot know
        self._life = secrets.token_hex(16)
        self._meeting = Meeting(size.replicas, size.processes, size.timeout, self._answer, tell, clock)
        self._guests: dict[int, Guest] = {}
        self._silence = Silence(size.silence, clock)
        self._ended: set[int] = set()
        self._empty_since: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether all replicas have ended; or some have, and the others did not come for as long as anybody waits."""
        if len(self._ended) == self._size.replicas:
            return True
        return self._empty_since is not None and self._clock() - self._empty_since > self._size.timeout

    def take(self, route: bytes, parts: Sequence[bytes]) -> None:
        """Take a packet of a connection. What is none is answered, and changes nothing."""
        try:
            kind, number, data = unpack(parts)
            if kind == HELLO:
                self._greet(route, number, data)
                return
            replica = next((each for each, guest in self._guests.items() if guest.route == route), None)
            if replica is None:
                self._send(route, pack(UNKNOWN, 0))
                return
            self._silence.heard(replica, trains=True)
            if kind == PIECE:
                self._guests[replica].line.take(number, data)
            elif kind == ACK:
                self._guests[replica].line.acknowledge(number)
        except WireError as error:
            self._refuse(route, f"the meeting place does not understand it: {error}")

    def look(self) -> None:
        """Let all hear that the hall is there, and lose who is silent. Call it all the time."""
        for guest in self._guests.values():
            if guest.hearing.done():
                guest.hearing.result()  # a mistake of ours ends the hall, so that nobody waits for its answer
            self._send(guest.route, pack(ACK, guest.line.expected))
        for replica in self._silence.too_long():
            self._leave(replica, f"nothing was heard of it for {self._size.silence:g} s")
        if not self._ended or any(not guest.has_ended for guest in self._guests.values()):
            self._empty_since = None
        elif self._empty_since is None:
            self._empty_since = self._clock()
        self._meeting.settle()

    def tell_end(self) -> None:
        """Say how the run has ended."""
        missing = sorted(set(range(self._size.replicas)) - self._ended)
        self._tell(f"the run has ended without {named(missing)}" if missing else "all replicas have ended")

    def _greet(self, route: bytes, version: int, data: bytes) -> None:
        """Let a gate in, or say why not. WireError if what it says is no hello."""
        if version != VERSION:
            self._refuse(route, "it is of another release of thinwire than the meeting place")
            return
        try:
            hello = json.loads(data)
            replica, life, told = int(hello["replica"]), str(hello["life"]), dict(hello["agreed"])
            hall, expected = hello["hall"], int(hello["expected"])
        except NO_MESSAGE as error:
            raise WireError("a hello was expected") from error
        if not 0 <= replica < self._size.replicas:
            self._refuse(route, f"the run has replicas 0 to {self._size.replicas - 1}")
            return
        guest = self._guests.get(replica)
        if hall is not None and (hall != self._life or guest is None or guest.life != life):
            anew = f"replica {replica} was lost there" if hall == self._life else "it has been started again"
            self._refuse(route, f"{anew}, so this replica comes anew", lasting=False)
        elif guest is not None and guest.life != life and not guest.has_ended:
            self._refuse(route, f"replica {replica} is there already", waits=True)
        elif mistake := difference({**(self._learned if self._guests else {}), **self._agreed}, told):
            self._refuse(route, mistake)
        else:
            self._learned = told
            self._let_in(route, replica, life, expected)

    def _let_in(self, route: bytes, replica: int, life: str, expected: int) -> None:
        guest = self._guests.get(replica)
        if guest is None or guest.life != life:
            if guest is not None:
                self._leave(replica, "another one has come")
            line = Line()
            guest = Guest(life, line, route, asyncio.create_task(self._hear(replica, line)))
            self._guests[replica] = guest
        guest.route = route
        self._silence.heard(replica, trains=True)
        self._send(route, pack_words(WELCOME, guest.line.expected, hall=self._life))
        guest.line.begin(lambda *packet: self._send(route, pack(*packet)), expected)

    def _refuse(self, route: bytes, text: str, *, lasting: bool = True, waits: bool = False) -> None:
        self._send(route, pack_words(REFUSAL, 0, text=text, lasting=lasting, waits=waits))

    async def _hear(self, replica: int, line: Line) -> None:
        """Hear a replica for as long as it is there."""
        try:
            while True:
                self._heed(replica, *await line.read())
        except NO_MESSAGE as error:
            self._leave(replica, f"it said what is no message: {error!r}")

    def _heed(self, replica: int, process: int, message: Message) -> None:
        words, _ = message
        if process != LAUNCHER:
            if not 0 <= process < self._size.processes:
                raise ValueError(f"process {process}")
            self._meeting.said(replica, process, message)
        elif "comes" in words:
            self._tell(f"replica {replica} has come")
            self._ended.discard(replica)
            self._guests[replica].has_ended = False
            self._meeting.comes(replica)
        elif "loses" in words:
            for_good = bool(words["for_good"])
            self._tell(f"replica {replica} has ended" if for_good else f"replica {replica} is lost, and comes again")
            self._guests[replica].has_ended = for_good
            self._ended |= {replica} if for_good else set()
            self._meeting.loses(replica, for_good=for_good)
        else:
            self._tell(f"replica {replica} stops after the next exchange")
            self._meeting.stop(replica)

    def _answer(self, replica: int, process: int, words: Mapping[str, Any], blobs: Sequence[bytes]) -> None:
        if replica in self._guests:
            self._guests[replica].line.write(process, words, blobs)

    def _leave(self, replica: int, why: str) -> None:
        """Forget a replica that is not there any more."""
        guest = self._guests.pop(replica)
        self._silence.forget(replica)
        guest.hearing.cancel()
        if not guest.has_ended:
            self._tell(f"replica {replica} is lost: {why}")
            self._meeting.loses(replica, for_good=False)
