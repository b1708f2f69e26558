"""Time and bytes of a stage, measured where they are spent.

Sections are exclusive: while `wire` runs inside `compute`, only `wire` advances, so the parts of a step add up to it.
A wait for a frame is a wait for the neighbour until the frame departs, and then a wait for the wire. The two parts are
known only after the frame arrives, because its header says when it departed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self, get_args

from thinwire.pipeline.frames import EXCHANGE

Section = Literal["compute", "encode", "neighbour", "wire", "wait", "decode"]
"""The sections. `neighbour` is waiting until a frame departs, `wire` is waiting until it arrives. `wait` is either of
them if the two cannot be distinguished: between processes whose clocks were never compared."""
SECTIONS: tuple[Section, ...] = get_args(Section)
WAITS: tuple[Section, ...] = ("neighbour", "wire", "wait")

Route = tuple[int, str, str]
"""Boundary, channel, phase."""


@dataclass
class Traffic:
    """What crossed one channel. Change none: it is not frozen because each frame makes one, in a third of the time."""

    frames: int = 0
    bytes: int = 0
    """Bytes of the frames, headers included."""
    uncompressed: int = 0
    """Bytes of the uncompressed tensors."""
    elements: int = 0
    """Elements of the tensors that go through the method."""
    rows: int = 0
    """Rows of those tensors."""
    full_rows: int = 0
    """Rows sent uncompressed: in warm-up, as first visits without a codec, in evaluation with compression off."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.frames + other.frames,
            self.bytes + other.bytes,
            self.uncompressed + other.uncompressed,
            self.elements + other.elements,
            self.rows + other.rows,
            self.full_rows + other.full_rows,
        )

    @property
    def bits_per_element(self) -> float:
        """Bits on the wire for each element, headers included; 0 if there are no elements."""
        return 8 * self.bytes / self.elements if self.elements else 0.0


@dataclass
class Meter:
    """Seconds of a stage by section and compute by task, and bytes sent and received by (boundary, channel, phase)."""

    seconds: dict[Section, float] = field(default_factory=lambda: dict.fromkeys(SECTIONS, 0.0))
    computing: dict[str, float] = field(default_factory=dict)
    """Seconds of compute by task: forward, backward, weights, loss, optimizer."""
    sent: dict[Route, Traffic] = field(default_factory=dict)
    received: dict[Route, Traffic] = field(default_factory=dict)
    exchange: dict[str, float] = field(default_factory=dict)
    """Seconds of the exchange with other replicas: those in each section, and `other`. Empty without replicas."""
    clock: Callable[[], float] = field(default_factory=lambda: time.perf_counter)
    """Reports when a section begins and ends. Of a GPU it may first wait until all that was asked of it is done."""
    _open: list[tuple[Section, str]] = field(default_factory=list)
    _since: float = 0.0

    def section(self, name: Section, what: str = "") -> Self:
        """Charge the time inside to `name`, not to the sections around it. For a `with`: the call begins the section.

        `what` says it in words; for compute it is the task.
        """
        self.turn()
        self._open.append((name, what))
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None:
        self.turn()
        self._open.pop()

    def waiting(self, what: str) -> Wait:
        """Charge the time inside to the neighbour until the frame departs, and to the wire from then on."""
        return Wait(self.section("wait", what))

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Count the time inside as a part of an exchange with other replicas."""
        started, before = time.perf_counter(), dict(self.seconds)
        yield
        spent: dict[str, float] = {name: self.seconds[name] - before[name] for name in SECTIONS}
        spent["other"] = time.perf_counter() - started - sum(spent.values())
        self.exchange = {name: self.exchange.get(name, 0.0) + seconds for name, seconds in spent.items()}

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Do not count the seconds inside, such as those of an evaluation. Traffic counts, in its own phase."""
        kept = dict(self.seconds), dict(self.computing)
        try:
            yield
        finally:
            self.seconds, self.computing = kept

    def turn(self) -> None:
        """Charge the time since the last turn to the innermost section."""
        now = self.clock()
        if self._open:
            name, what = self._open[-1]
            self.seconds[name] += now - self._since
            if name == "compute":
                self.computing[what] = self.computing.get(what, 0.0) + now - self._since
        self._since = now

    def state_dict(self) -> dict[str, Any]:
        """The measurements so far, as JSON values."""
        traffic = {
            name: [[*route, asdict(carried)] for route, carried in getattr(self, name).items()]
            for name in ("sent", "received")
        }
        spent = {name: dict(getattr(self, name)) for name in ("seconds", "computing", "exchange")}
        return {**spent, **traffic}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.seconds, self.computing = dict(state["seconds"]), dict(state["computing"])
        self.exchange = dict(state["exchange"])
        for name in ("sent", "received"):
            setattr(self, name, {tuple(route): Traffic(**carried) for *route, carried in state[name]})

    @property
    def doing(self) -> str:
        """The innermost open section in words; empty if there is none. Other threads may read it."""
        inside = self._open[-1:]
        return inside[0][1] or inside[0][0] if inside else ""

    @property
    def exchanged(self) -> int:
        """Bytes of the frames to and from other replicas."""
        routes = [*self.sent.items(), *self.received.items()]
        return sum(traffic.bytes for (_, channel, _), traffic in routes if channel in EXCHANGE)


class Wait:
    """A wait for a frame, in a section of a meter that has just begun."""

    departed: float | None = None
    """The time when the sender gave the frame to its transport, by this process's clock; None if unknown."""

    def __init__(self, meter: Meter) -> None:
        self._meter, self._started = meter, meter._since

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._meter.__exit__()
        if self.departed is not None:
            started, ended, seconds = self._started, self._meter._since, self._meter.seconds
            departed = min(max(self.departed, started), ended)
            seconds["wait"] -= ended - started
            seconds["neighbour"] += departed - started
            seconds["wire"] += ended - departed


def spending(meters: Sequence[Meter]) -> dict[Section, float]:
    """The seconds that the stages of these meters spent so far in each section."""
    return {name: sum(meter.seconds[name] for meter in meters) for name in SECTIONS}


def count(into: dict[Route, Traffic], route: Route, traffic: Traffic) -> None:
    """Add traffic to what a route has carried."""
    into[route] = into[route] + traffic if route in into else traffic
