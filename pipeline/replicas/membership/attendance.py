"""A stage process as a member of its run: what it sends the membership server, and what it gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thinwire.pipeline.errors import MismatchError, PeerError
from thinwire.pipeline.replicas.membership.messages import Message

if TYPE_CHECKING:
    from thinwire.pipeline.replicas.membership.client import Client


@dataclass(frozen=True)
class Taken:
    """The weights of another replica, which this one takes."""

    step: int
    """Optimizer steps after which they were exchanged."""
    giver: int
    passes: Mapping[int, Mapping[str, int]]
    """By stage, the index of its last pass, by phase."""
    state: bytes


@dataclass(frozen=True)
class Exchanged:
    """What the replicas that take part delivered."""

    samples: Mapping[int, int]
    """By replica, this one too, in their order: its samples since the last exchange."""
    frames: Mapping[int, list[bytes]]
    """By other replica: its frames, in the order in which it delivered them."""
    gives: bool
    """Whether this replica gives its weights to another one."""


class Attendance:
    """One process of a replica.

    Its `life` differs from start to start of the replica. `on_stop` is called when the run is to stop after this
    exchange.
    """

    def __init__(self, server: Client, replica: int, process: int, life: str) -> None:
        self._server, self.replica = server, replica
        self.on_stop: Callable[[], object] = lambda: None
        self._sender = {"replica": replica, "process": process, "life": life}

    def begin(
        self, held: int, digest: str, end: tuple[Mapping[int, Mapping[str, int]], bytes] | None = None
    ) -> Taken | None:
        """Say which common weights this replica has; other ones to take, or None if it goes on with them.

        Args:
            held: the step of their exchange.
            digest: that of the stages of this process.
            end: if no step is left to do, the passes and the state that others take.

        Raises:
            PeerError: the membership server is gone.
            MismatchError: the replicas have different weights.
            WireError: the answer is none.
        """
        said, given = {"kind": "begin", "held": held, "digest": digest}, list[bytes]()
        if end is not None:
            passes, state = end
            said, given = {**said, "kind": "end", "step": held, "passes": passes}, [state]
        words, blobs = self._ask(said, given)
        return None if words["kind"] == "go" else _taken(words, blobs)

    def exchange(self, step: int, samples: int, frames: list[bytes], *, last: bool) -> Exchanged | Taken:
        """Deliver the frames of an exchange, and wait until it is decided who takes part.

        Args:
            step: optimizer steps done.
            samples: those of this replica since the last exchange.
            frames: those of the stages of this process, in an order that is the same in all replicas.
            last: whether the run ends with it.

        Returns:
            What the others delivered; or other weights, if the exchange went on without this replica.

        Raises:
            PeerError, MismatchError, WireError: as `begin`.
        """
        words, blobs = self._ask({"kind": "deliver", "step": step, "samples": samples, "last": last}, frames)
        if words["kind"] != "exchange":
            return _taken(words, blobs)
        count = len(frames)
        arrived = {other: blobs[place * count :][:count] for place, other in enumerate(words["others"])}
        return Exchanged({int(name): number for name, number in words["samples"].items()}, arrived, words["gives"])

    def applied(
        self, step: int, digest: str, passes: Mapping[int, Mapping[str, int]], state: bytes | None, *, last: bool
    ) -> None:
        """Say that the weights after an exchange are in use; give them with `state`. Waits for no answer."""
        words = {"kind": "applied", "step": step, "digest": digest, "passes": passes, "last": last}
        self._server.send({**words, **self._sender}, [] if state is None else [state])

    def close(self, report: Callable[[str], None]) -> None:
        """Leave when the server has all messages, and print it if that takes long."""
        self._server.close(report)

    def _ask(self, words: Mapping[str, Any], blobs: list[bytes]) -> Message:
        told, arrived = self._server.ask({**words, **self._sender}, blobs)
        if told["kind"] == "failed":
            raise MismatchError(told["text"])
        if told["kind"] == "stopped":
            raise PeerError(f"replica {self.replica} was waiting for the weights of another one, and the run stops")
        if told["stop"]:
            self.on_stop()
        return told, arrived


def _taken(words: Mapping[str, Any], blobs: list[bytes]) -> Taken:
    passes = {int(stage): counts for stage, counts in words["passes"].items()}
    return Taken(words["step"], words["giver"], passes, blobs[0])
