"""Replicas that may be lost, without processes: small state machines around the real rules.

Weights are the list of exchanges that made them: each with its step, and what each replica brought, from which step to
which. So equal weights, an exchange that counts twice and one that is missing can be told by comparing lists. Messages
wait in a queue for each process, and a seed says which one is read next, who steps, who dies and when the clock moves.
"""

import json
import random
from collections import deque
from dataclasses import dataclass, field

from thinwire.pipeline.replicas.membership.rules import Membership

TIMEOUT = 10.0
MOST_TURNS = 3_000


@dataclass
class Worker:
    """One process of a replica."""

    weights: list = field(default_factory=list)
    """The exchanges that made them: [step, contributions], a contribution being [replica, from, to]."""
    held: int = 0
    said: deque = field(default_factory=deque)
    """Messages under way to the server."""
    told: deque = field(default_factory=deque)
    """Answers under way."""
    asks: bool = False
    """Whether it waits for an answer."""

    @property
    def state(self):
        return json.dumps([self.held, self.weights])

    def load(self, state):
        self.held, self.weights = json.loads(state)


@dataclass
class Replica:
    """One replica: its processes step together, and each speaks to the server for itself."""

    number: int
    workers: list
    done: int = 0
    life: str = "absent"
    """absent, runs, dead (and the launcher has not seen it), ended, stopped or lost."""
    stops: bool = False
    kinds: set = field(default_factory=set)
    """The kinds of the answers to the question under way."""
    checkpoints: list = field(default_factory=list)
    ends: bool = False
    """Whether all steps are done."""


class World:
    """A run of some replicas under a plan that a seed draws.

    Args:
        seed: draws everything.
    """

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.processes, self.every = self.draw.randint(1, 3), self.draw.randint(1, 3)
        self.steps = self.draw.randint(4, 12)
        self.replicas = [Replica(number, []) for number in range(self.draw.randint(2, 4))]
        self.pace = [self.draw.choice((1, 1, 1, 5)) for _ in self.replicas]
        self.faults = [
            self.draw.choice(("lost", "lost", "lost", "server", "stop")) for _ in range(self.draw.randint(0, 6))
        ]
        self.restarts = self.draw.randint(0, 8)
        self.now = 0.0
        self.begin()

    def begin(self):
        """Start all replicas with a server of their own, as the launcher does."""
        self.stopping = False
        self.rules = Membership(
            len(self.replicas), self.processes, TIMEOUT, self._answer, lambda _: None, lambda: self.now
        )
        for replica in self.replicas:
            self._start(replica)

    def go(self):
        """Run until nobody does; a run that was stopped goes on."""
        for _ in range(MOST_TURNS):
            if not (turns := self._turns()):
                if not any(replica.life == "stopped" for replica in self.replicas):
                    return
                self.begin()
                continue
            weights, acts = zip(*turns, strict=True)
            self.draw.choices(acts, weights)[0]()
        states = [(replica.life, replica.done, [w.asks for w in replica.workers]) for replica in self.replicas]
        raise AssertionError(f"somebody waits for ever: {states}")

    def _turns(self):
        """All that may happen next, each with its weight."""
        found = []
        for replica in self.replicas:
            slow = 1 / self.pace[replica.number]
            if replica.life in ("runs", "dead"):
                found += [
                    (1, lambda w=w, r=replica, i=i: self._read(r, i, w))
                    for i, w in enumerate(replica.workers)
                    if w.said
                ]
            if replica.life == "runs":
                found += [
                    (slow, lambda w=w, r=replica, i=i: self._hear(r, i, w))
                    for i, w in enumerate(replica.workers)
                    if w.told
                ]
                if not any(worker.asks for worker in replica.workers):
                    found.append((slow, lambda r=replica: self._step(r)))
            if replica.life == "dead":
                found.append((0.5, lambda r=replica: self._lose(r)))
            if replica.life == "absent":
                found.append((0.3, lambda r=replica: self._start(r)))
        if found or any(
            worker.asks for replica in self.replicas for worker in replica.workers if replica.life == "runs"
        ):
            found.append((0.05 if found else 1, self._wait))
            if self.faults:
                found.append((0.05, self._fault))
        return found

    def _wait(self):
        self.now += self.draw.choice((1, TIMEOUT))
        self.rules.settle()

    def _fault(self):
        fault, running = self.faults.pop(), [replica for replica in self.replicas if replica.life == "runs"]
        if fault == "lost" and running:
            self.draw.choice(running).life = "dead"
        elif fault == "server" and self.restarts:
            self.restarts -= 1
            for replica in self.replicas:  # those who have ended start again too
                if replica.life == "runs":
                    replica.life = "dead"
            self.begin()
        elif fault == "stop":
            self.stopping = True
            self.rules.stop()

    def _lose(self, replica):
        """The launcher sees that a replica has ended. What it said, and nobody has read, is gone."""
        again = self.restarts > 0 and not self.stopping
        self.restarts -= again
        replica.life = "absent" if again else "stopped" if self.stopping else "lost"
        replica.workers = []
        self.rules.loses(replica.number, for_good=not again)

    def _start(self, replica):
        """Its processes start from its newest checkpoint, or from the one before if that is damaged."""
        if replica.checkpoints and self.draw.random() < 0.2:
            replica.checkpoints.pop()
        replica.workers = [Worker() for _ in range(self.processes)]
        replica.done = 0
        if replica.checkpoints:
            replica.done, states = replica.checkpoints[-1]
            for worker, state in zip(replica.workers, states, strict=True):
                worker.load(state)
        replica.life, replica.stops, replica.ends = "runs", False, False
        self.rules.comes(replica.number)
        self._ask(replica, lambda worker: self._beginning(replica, worker))

    def _beginning(self, replica, worker):
        if replica.done < self.steps:
            return {"kind": "begin", "held": worker.held}, []
        return {"kind": "end", "held": worker.held, "step": worker.held, "passes": {}}, [worker.state]

    def _ask(self, replica, message):
        replica.kinds = set()
        for worker in replica.workers:
            worker.asks = True
            words, blobs = message(worker)
            worker.said.append(({"digest": worker.state, **words}, blobs))

    def _read(self, replica, process, worker):
        """The server reads a message."""
        self.rules.received(replica.number, process, worker.said.popleft())

    def _answer(self, number, process, words, blobs):
        replica = self.replicas[number]
        assert replica.life in ("runs", "dead") and replica.workers[process].asks, "nobody asked"
        assert words["kind"] != "failed", words
        replica.workers[process].told.append((dict(words), list(blobs)))

    def _hear(self, replica, process, worker):
        """A process takes an answer."""
        words, blobs = worker.told.popleft()
        worker.asks = False
        replica.kinds.add(words["kind"])
        assert len(replica.kinds) == 1, f"the processes of one replica are told {replica.kinds}"
        if words["kind"] == "stopped":
            replica.life = "dead"
            return
        replica.stops |= words["stop"]
        if words["kind"] == "take":
            worker.load(blobs[0])
            assert worker.held == words["step"]
            replica.done = words["step"]
        elif words["kind"] == "exchange":
            self._apply(replica, process, worker, words, blobs)
        if not any(worker.asks for worker in replica.workers):
            self._after_answer(replica)

    def _apply(self, replica, process, worker, words, blobs):
        mine = json.dumps([replica.number, process, worker.held, worker.weights])
        brought = {each[0]: each for each in map(json.loads, [mine, *blobs])}
        assert sorted(brought) == sorted(words["samples"]), "who takes part, and what arrived"
        contributions = []
        for number, (_, of, held, weights) in sorted(brought.items()):
            assert of == process and weights == worker.weights, "they began from other weights"
            assert words["samples"][number] == replica.done - held
            contributions.append([number, held, replica.done])
        worker.weights = [*worker.weights, [replica.done, contributions]]
        worker.held = replica.done
        last = replica.done == self.steps
        said = {"kind": "applied", "step": replica.done, "digest": worker.state, "passes": {}, "last": last}
        worker.said.append((said, [worker.state] if words["gives"] else []))

    def _step(self, replica):
        """All processes of a replica do a step, and deliver if an exchange is due; or the replica ends."""
        if replica.ends:
            self._end(replica, "ended")
            return
        replica.done += 1
        last = replica.done == self.steps
        if last or replica.done % self.every == 0:
            self._ask(replica, lambda worker: self._delivery(replica, worker, last=last))
        else:
            self._after_step(replica)

    def _delivery(self, replica, worker, *, last):
        process = next(place for place, each in enumerate(replica.workers) if each is worker)
        words = {"kind": "deliver", "step": replica.done, "samples": replica.done - worker.held, "last": last}
        return words, [json.dumps([replica.number, process, worker.held, worker.weights])]

    def _after_answer(self, replica):
        assert len({worker.state for worker in replica.workers}) == 1
        self._after_step(replica)

    def _after_step(self, replica):
        if replica.done == self.steps:
            replica.ends = True  # its last checkpoint is a turn of its own
        elif replica.stops:
            self._end(replica, "stopped")
        elif self.draw.random() < 0.5:
            self._save(replica)

    def _save(self, replica):
        replica.checkpoints = [c for c in replica.checkpoints if c[0] < replica.done][-1:]
        replica.checkpoints.append((replica.done, [worker.state for worker in replica.workers]))

    def _end(self, replica, how):
        self._save(replica)
        for place, worker in enumerate(replica.workers):
            while worker.said:  # it saves its weights before it ends, and so the server has read all
                self._read(replica, place, worker)
        replica.life = how
        self.rules.loses(replica.number, for_good=True)
