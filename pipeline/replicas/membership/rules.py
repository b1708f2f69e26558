"""The rules of membership: who takes part in an exchange, who goes on, and who takes the weights of another.

They know neither sockets nor frames. `said` takes a message of a process, and `answer` sends one; the launcher says who
starts, who is lost and who leaves. A replica is in one of these states:

    away       lost, or not started yet; it may come
    gone       ended or given up; it does not come any more
    starting   its processes run, and not all of them have sent `begin`
    waiting    it holds other weights than the current ones; it has asked, and gets an answer later
    training   it holds the current weights, and trains
    delivered  it has delivered all frames of the exchange
    late       an exchange went on without it, and it has not delivered yet
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from thinwire.errors.words import numbered
from thinwire.pipeline.errors import WireError
from thinwire.pipeline.replicas.membership.messages import Message, kind_of

State = Literal["away", "gone", "starting", "waiting", "training", "delivered", "late"]
Answer = Callable[[int, int, Mapping[str, Any], Sequence[bytes]], None]
"""Sends words and blobs to a process of a replica."""


@dataclass(frozen=True)
class Held:
    """Common weights: those after the exchange of a step."""

    step: int
    digest: tuple[str, ...] | None
    """Of the stages of each process; None until a replica has sent it."""


@dataclass
class Member:
    """What is known of one replica."""

    state: State
    held: Held = field(default_factory=lambda: Held(-1, None))
    asked: dict[int, Message] = field(default_factory=dict)
    """By process: what it sent and waits for an answer to."""
    applied: dict[int, Message] = field(default_factory=dict)
    """By process: what it sent after the last exchange."""


class Membership:
    """The replicas of a run, and who of them takes part.

    Args:
        replicas: their number.
        processes: those of each replica.
        timeout: seconds to wait for the others.
        answer: sends a message.
        report: prints a sentence for the user.
        clock: the time in seconds.
    """

    def __init__(
        self,
        replicas: int,
        processes: int,
        timeout: float,
        answer: Answer,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = [Member("away") for _ in range(replicas)]
        self._processes, self._timeout, self._clock = range(processes), timeout, clock
        self._answer, self._report = answer, report
        self._current: Held | None = None
        self._last_members = list(range(replicas))
        self._final: tuple[int, list[Message]] | None = None  # who gives, and what all take that come after the end
        self._waits_for: str | None = None
        self._deadline = 0.0
        self._stopping: set[int] = set()
        self._failure: str | None = None
        self._handlers = {
            "begin": self._begins,
            "end": self._begins,
            "deliver": self._delivers,
            "applied": self._applies,
        }

    def comes(self, replica: int) -> None:
        """Note that the processes of a replica start."""
        self._stopping.discard(replica)
        self._members[replica] = Member("starting")

    def loses(self, replica: int, *, for_good: bool) -> None:
        """Note that a replica has ended, and whether it comes again."""
        self._members[replica] = Member("gone" if for_good else "away")
        self.settle()

    def has_reached_end(self, replica: int) -> bool:
        """Whether a replica holds the weights of the end of the run."""
        if self._final is None:
            return False
        _, [(words, _), *_] = self._final
        return self._members[replica].held.step == int(words["step"])

    def stop(self, replica: int | None = None) -> None:
        """Have a replica stop after the next exchange, or all."""
        self._stopping |= set(range(len(self._members)) if replica is None else [replica])
        self.settle()

    def received(self, replica: int, process: int, message: Message) -> None:
        """Take a message of a process. WireError if it does not fit to what the other processes of its replica say."""
        member, (words, _) = self._members[replica], message
        if member.state in ("away", "gone"):
            raise WireError("a replica must come before its processes say anything")
        if self._failure is not None:
            if words["kind"] != "applied":
                self._answer(replica, process, {"kind": "failed", "text": self._failure}, [])
            return
        kept = member.applied if words["kind"] == "applied" else member.asked
        kept[process] = message
        if len(kept) == len(self._processes):
            self._handlers[kind_of(kept)](replica)
        self.settle()

    def settle(self) -> None:
        """Do all that can be done now. Call it from time to time, because waiting ends some day."""
        self._look_at_clock()
        while self._failure is None and any(act() for act in (self._admit, self._finish, self._elect, self._exchange)):
            self._look_at_clock()
        if not self._in("training", "delivered"):
            for replica in self._stopping.intersection(self._in("waiting")):
                self._reply(replica, {"kind": "stopped"})
                self._members[replica].state = "late"  # until the launcher sees its end

    def _in(self, *states: State) -> list[int]:
        """The replicas in some states."""
        return [replica for replica, member in enumerate(self._members) if member.state in states]

    def _look_at_clock(self) -> None:
        """Begin to wait where there is something new to wait for."""
        found = "others" if self._in("delivered") else None
        if found is None and self._in("waiting") and not self._in("training"):
            found = "newest"
        if found != self._waits_for:
            self._waits_for, self._deadline = found, self._clock() + self._timeout

    @property
    def _is_over(self) -> bool:
        """Whether a wait has been long enough."""
        return self._clock() >= self._deadline

    def _begins(self, replica: int) -> None:
        member = self._members[replica]
        member.held = Held(member.asked[0][0]["held"], self._digest(member.asked))
        member.state = "waiting"

    def _delivers(self, replica: int) -> None:
        member = self._members[replica]
        member.state = "delivered" if member.state == "training" else "waiting"

    def _applies(self, replica: int) -> None:
        """Compare the weights of a replica after an exchange with those of the others; give them to who waits."""
        member = self._members[replica]
        told, member.applied = member.applied, {}
        found = Held(told[0][0]["step"], self._digest(told))
        # a later exchange went on without it; if all others have begun again from older weights, at the same step again
        if member.state == "late" or self._current is None or found.step != self._current.step:
            return
        if self._current.digest not in (None, found.digest):
            self._fail(
                f"the weights of replica {replica} after the exchange of step {found.step} differ from those of "
                f"the others, but all must hold equal ones; use the same kind of machine for all, and no buffers that "
                f"change in training, but for running statistics of norms"
            )
            return
        self._current = found
        for each in self._members:
            if each.state in ("training", "delivered") and each.held.step == found.step:
                each.held = found
        given = [told[process] for process in self._processes]
        if given[0][1]:
            for other in self._in("waiting"):
                self._give(replica, given, other)
            if given[0][0]["last"]:
                self._final = self._final or (replica, given)

    def _digest(self, told: Mapping[int, Message]) -> tuple[str, ...]:
        return tuple(told[process][0]["digest"] for process in self._processes)

    def _fail(self, text: str) -> None:
        """Answer everybody who waits, and whoever asks from now on, that the run cannot go on."""
        self._failure = text
        for replica, member in enumerate(self._members):
            for process in member.asked:
                self._answer(replica, process, {"kind": "failed", "text": text}, [])
            member.asked = {}

    def _reply(self, replica: int, words: Mapping[str, Any], blobs: Sequence[Sequence[bytes]] | None = None) -> None:
        """Answer all processes of a replica, each with its own blobs."""
        self._members[replica].asked = {}
        for process in self._processes:
            told = {**words, "stop": replica in self._stopping}
            self._answer(replica, process, told, blobs[process] if blobs else [])

    def _admit(self) -> bool:
        """Let those train who hold the current weights."""
        current = self._current
        held = [r for r in self._in("waiting") if current and current.digest and self._members[r].held == current]
        for replica in held:
            self._go_on(replica)
        return bool(held)

    def _go_on(self, replica: int) -> None:
        """Let a replica go on with the weights that it holds."""
        member = self._members[replica]
        if member.asked[0][0]["kind"] == "deliver":  # it is at the exchange already
            member.state = "delivered"
            return
        member.state = "training"
        self._reply(replica, {"kind": "go"})

    def _finish(self) -> bool:
        """Give the weights of the end to those who come after it."""
        waiting = self._in("waiting") if self._final is not None else []
        for replica in waiting:
            assert self._final is not None, "it was asked above"
            self._give(*self._final, replica)
        return bool(waiting)

    def _give(self, giver: int, given: Sequence[Message], replica: int) -> None:
        """Give a replica the weights of another one."""
        words = [words for words, _ in given]
        member = self._members[replica]
        member.state, member.held = "training", Held(words[0]["step"], self._digest(dict(enumerate(given))))
        passes = {stage: count for each in words for stage, count in each["passes"].items()}
        answer = {"kind": "take", "step": words[0]["step"], "giver": giver, "passes": passes}
        self._reply(replica, answer, [blobs for _, blobs in given])
        self._report(f"replica {replica} is back: it took the weights of replica {giver} after step {words[0]['step']}")

    def _elect(self) -> bool:
        """If nobody trains, let those who hold the newest weights go on, once all have sent theirs."""
        waiting = [replica for replica in self._in("waiting") if replica not in self._stopping]
        if not waiting or self._in("training", "delivered"):
            return False
        if self._in("away", "starting", "late") and not self._is_over:
            return False
        newest = max((self._members[replica].held for replica in waiting), key=lambda held: held.step)
        if self._current is not None and newest.step < self._current.step:
            self._report(
                f"no replica has the weights after step {self._current.step} any more: the run goes on with those "
                f"after step {newest.step}"
            )
        self._current = newest
        for replica in waiting:
            if self._members[replica].held == newest:
                told = [self._members[replica].asked[process] for process in self._processes]
                if told[0][0]["kind"] == "end":  # those who have older weights get these
                    self._final = replica, told
                self._go_on(replica)
        return True

    def _exchange(self) -> bool:
        """Decide who takes part in an exchange, and give all of them what the others delivered."""
        members = self._in("delivered")
        if not members or (self._in("training") and not self._is_over):
            return False
        asked = {replica: self._members[replica].asked for replica in members}
        steps = {words["step"] for messages in asked.values() for words, _ in messages.values()}
        if len(steps) > 1:
            self._fail(f"all replicas must exchange after the same steps, got {', '.join(map(str, sorted(steps)))}")
            return False
        [step] = steps
        first = asked[members[0]][0][0]
        # at the end all give, for one who takes part, is lost before its weights are saved, and comes back: any other
        # one may be lost before it gives
        givers = members if first["last"] else members[:1] if self._in("waiting") else []
        for replica in self._in("training"):
            self._members[replica].state = "late"
        self._current = Held(step, None)
        for replica in members:
            member = self._members[replica]
            member.state, member.held, member.applied = "training", self._current, {}
        for replica in members:
            self._hand_out(replica, asked, gives=replica in givers)
        self._tell_members(members, step)
        return True

    def _hand_out(self, replica: int, asked: Mapping[int, Mapping[int, Message]], *, gives: bool) -> None:
        """Give one who takes part what the others delivered for each of its processes."""
        others = [other for other in asked if other != replica]
        words = {
            "kind": "exchange",
            "samples": {other: messages[0][0]["samples"] for other, messages in asked.items()},
            "others": others,
            "gives": gives,
        }
        blobs = [[blob for other in others for blob in asked[other][process][1]] for process in self._processes]
        self._reply(replica, words, blobs)

    def _tell_members(self, members: Sequence[int], step: int) -> None:
        """Say who takes part, where that has changed."""
        if members == self._last_members:
            return
        self._last_members = list(members)
        absent = [replica for replica in range(len(self._members)) if replica not in members]
        without = f", without {numbered('replica', absent)}" if absent else " again"
        self._report(
            f"the exchange after step {step} goes on with {len(members)} of {len(self._members)} replicas{without}"
        )
