"""The meeting place of replicas on several hosts, without its socket: who is there, and who may come.

What it hears of a replica goes to the same rules as on one machine. A replica that is silent for too long is lost. A
proxy that finds its way back before that goes on as if nothing had happened; later it is told to come anew.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.launch.run.crews.remote.agreement import difference, warning
from thinwire.launch.run.crews.remote.stream import (
    ACK,
    HELLO,
    LAUNCHER,
    PIECE,
    REFUSAL,
    UNKNOWN,
    VERSION,
    WELCOME,
    MessageStream,
    pack,
    pack_words,
    unpack,
)
from thinwire.launch.run.heartbeat.pulse import Doing
from thinwire.launch.run.heartbeat.silence import Silence
from thinwire.launch.shared.exit_codes import FailedError
from thinwire.pipeline.errors import WireError
from thinwire.pipeline.replicas.membership.fields import LAUNCHED, SAID, check
from thinwire.pipeline.replicas.membership.meeting import Meeting, named
from thinwire.pipeline.replicas.membership.messages import Message

_NO_HELLO = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What JSON of another shape than that of a hello raises where it is read."""


@dataclass(frozen=True)
class Size:
    """What the server must know of a run."""

    replicas: int
    processes: int
    """Of each replica."""
    timeout: float
    """Seconds that replicas wait for each other."""
    silence: float
    """Seconds of silence after which a replica is lost."""
    largest: int
    """The most bytes that a message of a stage process carries."""


@dataclass
class Session:
    """A replica that is there."""

    id: str
    """Drawn by its proxy."""
    stream: MessageStream
    route: bytes
    """What the socket calls its connection."""
    hearing: asyncio.Task[None]
    has_ended: bool = False


class MeetingServer:
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
        self._learned: dict[str, str] = {}  # what those who are there agree on, and the server cannot know
        self._id = secrets.token_hex(16)
        self._meeting = Meeting(size.replicas, size.processes, size.timeout, self._answer, tell, clock)
        self._sessions: dict[int, Session] = {}
        self._silence = Silence(size.silence, 0.0, clock)
        self._ended: set[int] = set()
        self._finished: set[int] = set()  # those of them that have reached the end of the run
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
            replica = next((each for each, session in self._sessions.items() if session.route == route), None)
            if replica is None:
                self._send(route, pack(UNKNOWN, 0))
                return
            self._silence.heard(replica, Doing.TRAINING)
            if kind == PIECE:
                self._sessions[replica].stream.take(number, data)
            elif kind == ACK:
                self._sessions[replica].stream.acknowledge(number)
        except WireError as error:
            self._refuse(route, f"the meeting place does not understand it: {error}")

    def look(self) -> None:
        """Let all hear that the server is there, and lose who is silent. Call it all the time."""
        for session in self._sessions.values():
            if session.hearing.done():
                session.hearing.result()  # a mistake of ours ends the server, so that nobody waits for its answer
            self._send(session.route, pack(ACK, session.stream.expected))
        for replica in self._silence.too_long():
            self._leave(replica, f"nothing was heard of it for {self._size.silence:g} s")
        if not self._ended or any(not session.has_ended for session in self._sessions.values()):
            self._empty_since = None
        elif self._empty_since is None:
            self._empty_since = self._clock()
        self._meeting.settle()

    def tell_end(self) -> None:
        """Say how the run has ended. FailedError if no replica has reached the end of it."""
        missing = sorted(set(range(self._size.replicas)) - self._finished)
        if not self._finished:
            raise FailedError("no replica has reached the end of the run; their hosts say why")
        self._tell(f"the run has ended without {named(missing)}" if missing else "all replicas have ended")

    def _greet(self, route: bytes, version: int, data: bytes) -> None:
        """Let a proxy in, or say why not. WireError if what it says is no hello."""
        if version != VERSION:
            self._refuse(route, "it is of another release of thinwire than the meeting place")
            return
        try:
            hello = json.loads(data)
            replica, session_id, told = int(hello["replica"]), str(hello["session"]), dict(hello["agreed"])
            server, expected = hello["server"], int(hello["expected"])
        except _NO_HELLO as error:
            raise WireError("a hello was expected") from error
        if not 0 <= replica < self._size.replicas:
            self._refuse(route, f"the run has replicas 0 to {self._size.replicas - 1}")
            return
        session, others = self._sessions.get(replica), self._sessions.keys() - {replica}
        if server is not None and (server != self._id or session is None or session.id != session_id):
            anew = f"replica {replica} was lost there" if server == self._id else "it has been started again"
            self._refuse(route, f"{anew}, so this replica comes anew", lasting=False)
        elif session is not None and session.id != session_id and not session.has_ended:
            self._refuse(route, f"replica {replica} is there already", waits=True)
        elif mistake := difference({**(known := self._learned if others else {}), **self._agreed}, told):
            self._refuse(route, mistake)
        else:
            self._learned = {**told, **known}
            self._let_in(route, replica, session_id, expected, warning(known, told))

    def _let_in(self, route: bytes, replica: int, session_id: str, expected: int, noted: str | None) -> None:
        session = self._sessions.get(replica)
        if session is None or session.id != session_id:
            if session is not None:
                self._leave(replica, "another one has come")
            stream = MessageStream()
            session = Session(session_id, stream, route, asyncio.create_task(self._hear(replica, stream)))
            self._sessions[replica] = session
            if noted:
                self._tell(f"replica {replica} comes; {noted}")
        session.route = route
        self._silence.heard(replica, Doing.TRAINING)
        self._send(route, pack_words(WELCOME, session.stream.expected, server=self._id, noted=noted))
        session.stream.begin(lambda *packet: self._send(route, pack(*packet)), expected)

    def _refuse(self, route: bytes, text: str, *, lasting: bool = True, waits: bool = False) -> None:
        self._send(route, pack_words(REFUSAL, 0, text=text, lasting=lasting, waits=waits))

    async def _hear(self, replica: int, stream: MessageStream) -> None:
        """Hear a replica for as long as it is there."""
        try:
            while True:
                self._heed(replica, *await stream.read(self._size.largest))
        except WireError as error:
            self._refuse(self._sessions[replica].route, f"replica {replica} said what is no message: {error}")
            self._leave(replica, f"it said what is no message: {error}")

    def _heed(self, replica: int, process: int, message: Message) -> None:
        """Do what a message says. WireError if it is none."""
        words, _ = message
        check(message, LAUNCHED if process == LAUNCHER else SAID)
        if process != LAUNCHER:
            if not 0 <= process < self._size.processes:
                raise WireError(f"a replica has processes 0 to {self._size.processes - 1}, and it names {process}")
            self._meeting.said(replica, process, message)
        elif words["kind"] == "comes":
            self._tell(f"replica {replica} has come")
            self._ended.discard(replica)
            self._finished.discard(replica)
            self._sessions[replica].has_ended = False
            self._meeting.comes(replica)
        elif words["kind"] == "loses":
            for_good, finished = words["for_good"], self._meeting.has_reached_end(replica)
            left = "has ended" if finished else "has left before the end of the run"
            self._tell(f"replica {replica} {left}" if for_good else f"replica {replica} is lost, and comes again")
            self._sessions[replica].has_ended = for_good
            self._ended |= {replica} if for_good else set()
            self._finished |= {replica} if for_good and finished else set()
            self._meeting.loses(replica, for_good=for_good)
        else:
            self._tell(f"replica {replica} stops after the next exchange")
            self._meeting.stop(replica)

    def _answer(self, replica: int, process: int, words: Mapping[str, Any], blobs: Sequence[bytes]) -> None:
        if replica in self._sessions:
            self._sessions[replica].stream.write(process, words, blobs)

    def _leave(self, replica: int, why: str) -> None:
        """Forget a replica that is not there any more."""
        session = self._sessions.pop(replica)
        self._silence.forget(replica)
        session.hearing.cancel()
        if not session.has_ended:
            self._tell(f"replica {replica} is lost: {why}")
            self._meeting.loses(replica, for_good=False)
