"""The membership server: who is there, who may come, and what the rules decide. It knows messages, and no sockets.

A launcher on another host has a connection of its own, and is lost with its replica when it sends nothing for too
long. A launcher on this machine calls `launch`, and is always reached. A start of a replica has a life, a text that its
launcher draws: what is under way of an earlier start, or of a replica that is lost, is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from thinwire.errors.words import numbered
from thinwire.pipeline.errors import WireError
from thinwire.pipeline.replicas.membership.client import LATE
from thinwire.pipeline.replicas.membership.messages import LAUNCHED, SAID, Message, check, pack, unpack
from thinwire.pipeline.replicas.membership.rules import Membership

if TYPE_CHECKING:
    from thinwire.pipeline.processes.zeromq.mesh import Mesh

TORCH = "the release of torch"
"""In this, replicas may differ, with a warning: their bits may, and are compared after each exchange."""


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


@dataclass
class Session:
    """A replica that is there."""

    launcher: int | None
    """Its launcher; None if that is on this machine."""
    life: str | None = None
    """That of its start; None if it does not run."""
    processes: dict[int, int] = field(default_factory=dict)
    """The numbers of its processes on the network."""
    has_ended: bool = False


class Server:
    """The membership server.

    Args:
        size: what it knows of the run.
        agreed: what all replicas must agree on; None if all are on this machine.
        report: prints a sentence for the user.
        clock: the time in seconds.

    Attributes:
        network: carries messages; it knows each process that sends some by a number.
    """

    network: Mesh

    def __init__(
        self,
        size: Size,
        agreed: Mapping[str, str] | None,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._size, self._agreed, self._clock = size, agreed, clock
        self._report = report if agreed is not None else lambda text: None  # launchers here print it themselves
        self._learned: dict[str, str] = {}  # what those who are there agree on, and the server cannot know
        self._rules = Membership(size.replicas, size.processes, size.timeout, self._answer, report, clock)
        here = range(size.replicas) if agreed is None else ()
        self._sessions = {replica: Session(None) for replica in here}
        self._over: set[str] = set()  # lives that have ended
        self._early: list[tuple[int, Message]] = []  # the last ones from processes of which no launcher has spoken yet
        self._ended: set[int] = set()
        self._finished: set[int] = set()  # those of them that have reached the end of the run
        self._empty_since: float | None = None
        self._looked = self._patient_until = clock()

    @property
    def is_over(self) -> bool:
        """Whether all replicas have ended; or some have, and the others did not come for as long as anybody waits."""
        if len(self._ended) == self._size.replicas:
            return True
        return self._empty_since is not None and self._clock() - self._empty_since > self._size.timeout

    @property
    def missing(self) -> list[int]:
        """The replicas that have not reached the end of the run."""
        return sorted(set(range(self._size.replicas)) - self._finished)

    def take(self, peer: int, data: bytes) -> None:
        """Take a message of a process. What is none loses its replica."""
        try:
            words, _ = message = unpack(data)
            check(message, {**LAUNCHED, **SAID})
            if words["kind"] in SAID:
                self._receive(peer, message)
            elif words["kind"] == "launcher":
                self._greet(peer, words)
            elif (session := self._sessions.get(words["replica"])) is None or session.launcher != peer:
                raise WireError(f"its launcher must be there before it speaks of replica {words['replica']}")
            else:
                self.launch(words)
        except WireError as error:
            self.turn_away(peer, str(error))

    def turn_away(self, peer: int, mistake: str) -> None:
        """Lose the replica of a process because of what it sent; other processes are forgotten."""
        for replica, session in list(self._sessions.items()):
            if peer == session.launcher or peer in session.processes.values():
                text = f"replica {replica} sent an invalid message: {mistake}"
                self._send(peer, {"kind": "refused" if peer == session.launcher else "failed", "text": text})
                if session.launcher not in (None, peer):
                    self._send(session.launcher, {"kind": "refused", "text": text})
                self._leave(replica, f"it sent an invalid message: {mistake}")
                return
        self.network.forget(peer)

    def look(self) -> None:
        """Lose who is silent, and do what waiting has made possible. Call it all the time."""
        now = self._clock()
        if now - self._looked > LATE:
            self._patient_until = now + self._size.silence
        self._looked = now
        for replica, session in list(self._sessions.items()):
            silent = session.launcher is not None and self.network.silence(session.launcher) > self._size.silence
            if silent and now >= self._patient_until:
                self._leave(replica, f"it sent nothing for {self._size.silence:g} s")
        if not self._ended or any(not session.has_ended for session in self._sessions.values()):
            self._empty_since = None
        elif self._empty_since is None:
            self._empty_since = now
        self._rules.settle()

    def launch(self, words: Mapping[str, Any]) -> None:
        """Do what the launcher of a replica says of it."""
        replica, kind = words["replica"], words["kind"]
        session = self._sessions[replica]
        if kind == "comes":
            self._come(replica, words["life"])
        elif kind == "stop":
            self._report(f"replica {replica} stops after the next exchange")
            self._rules.stop(replica)
        elif session.life == words["life"]:
            for_good, finished = words["for_good"], self._rules.has_reached_end(replica)
            left = "has ended" if finished else "has left before the end of the run"
            self._report(f"replica {replica} {left}" if for_good else f"replica {replica} is lost, and comes again")
            session.has_ended = for_good
            self._ended |= {replica} if for_good else set()
            self._finished |= {replica} if for_good and finished else set()
            self._end_life(session)
            self._rules.loses(replica, for_good=for_good)

    def _greet(self, launcher: int, words: Mapping[str, Any]) -> None:
        """Let a launcher in, or say why not."""
        replica, told = words["replica"], words["agreed"]
        session, others = self._sessions.get(replica), self._sessions.keys() - {replica}
        known = self._learned if others else {}
        if not 0 <= replica < self._size.replicas:
            self._send(launcher, {"kind": "refused", "text": f"the run has replicas 0 to {self._size.replicas - 1}"})
        elif session is not None and session.launcher != launcher and not session.has_ended:
            self._send(launcher, {"kind": "wait", "text": f"replica {replica} is there already"})
        elif mistake := difference({**known, **(self._agreed or {})}, told):
            self._send(launcher, {"kind": "refused", "text": mistake})
        else:
            if session is not None and session.launcher != launcher:
                self._leave(replica, "another one has come")
            noted = warning(known, told)
            self._learned = {**told, **known}
            self._sessions[replica] = Session(launcher)
            if noted:
                self._report(f"replica {replica} comes; {noted}")
            self._send(launcher, {"kind": "welcome", "noted": noted})

    def _receive(self, peer: int, message: Message) -> None:
        """Take what a stage process says."""
        words, _ = message
        replica, process, life = words["replica"], words["process"], words["life"]
        if life in self._over:
            return
        if not (replica < self._size.replicas and process < self._size.processes):
            last = self._size.replicas - 1, self._size.processes - 1
            raise WireError(f"there are replicas 0 to {last[0]} of processes 0 to {last[1]}, got {replica}, {process}")
        session = self._sessions.get(replica)
        if session is None or session.life != life:  # it was faster than its launcher
            kept = [each for each in self._early if each[0] != peer]
            self._early = [*kept[1 - self._size.replicas * self._size.processes :], (peer, message)]
            return
        session.processes[process] = peer
        self._rules.received(replica, process, message)

    def _come(self, replica: int, life: str) -> None:
        """Note a start of a replica."""
        session = self._sessions[replica]
        self._end_life(session)
        self._report(f"replica {replica} has come")
        self._ended.discard(replica)
        self._finished.discard(replica)
        session.life, session.has_ended = life, False
        self._rules.comes(replica)
        early, self._early = self._early, []
        for peer, message in early:
            self.take(peer, pack(*message))

    def _end_life(self, session: Session) -> None:
        for process in session.processes.values():
            self.network.forget(process)
        session.processes = {}
        if session.life is not None:
            self._over.add(session.life)
            session.life = None

    def _leave(self, replica: int, why: str) -> None:
        """Forget a replica that is not there any more; one of this machine is there as long as its launcher."""
        session = self._sessions[replica]
        if session.launcher is not None:
            del self._sessions[replica]
            self.network.forget(session.launcher)
        self._end_life(session)
        if not session.has_ended:
            self._report(f"replica {replica} is lost: {why}")
            self._rules.loses(replica, for_good=False)

    def _answer(self, replica: int, process: int, words: Mapping[str, Any], blobs: Sequence[bytes]) -> None:
        session = self._sessions.get(replica)
        if session is not None and process in session.processes:
            self._send(session.processes[process], words, blobs)

    def _send(self, peer: int, words: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> None:
        self.network.give(peer, pack(words, blobs))

    def ended(self) -> str | None:
        """How the run has ended, in words; None if no replica has reached the end of it."""
        if not self._finished:
            return None
        return (
            f"the run has ended without {numbered('replica', self.missing)}"
            if self.missing
            else "all replicas have ended"
        )


def difference(known: Mapping[str, str], told: Mapping[str, str]) -> str | None:
    """What differs and must not, in words; None if all agree. Only what both name is compared."""
    differing = [name for name in known if name in told and known[name] != told[name] and name != TORCH]
    if not differing:
        return None
    listed = ", ".join(f"{name} ({known[name]} at the server, {told[name]} here)" for name in differing)
    return f"all replicas must have the same recipe, data and release of thinwire, and these differ: {listed}"


def warning(known: Mapping[str, str], told: Mapping[str, str]) -> str:
    """What differs and may, in words; nothing if nothing does."""
    there, here = known.get(TORCH), told.get(TORCH)
    if there in (None, here):
        return ""
    return (
        f"it has torch {here}, and another replica has {there}: their weights may differ in the last bits, and then "
        f"the run stops"
    )
