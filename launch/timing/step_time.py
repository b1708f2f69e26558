r"""One step of a pipeline, simulated event by event: when every action starts and ends, and every frame arrives.

    process p    | decode | forward | encode |   wait   | decode | backward | encode | ...
                                             \
    link p -> q                               | frame: bytes / bandwidth |··latency··>
                                                                                      \
    process q                                          waits for it, if it must        | decode | forward ...

The rules:

- A process does its actions in the order of the schedule, each as soon as its input is there.
- A process never waits for a send. Receives are posted ahead.
- A link carries one frame after another in each direction. While both directions are busy, each has only a share of its
  bandwidth.
- A frame arrives one latency after its last byte has left.

If codecs take no time, the length of the step is the LIMIT, fill and drain included: no implementation of the schedule
can be faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from thinwire.launch.timing.timetable import FORWARD, Timetable

_ROUNDS = 6
"""Rounds of the search for how much frames slow each other; after 6, changes were below 1e-4 of a step."""

Seconds = NDArray[np.float64]
PerStage = float | Sequence[float]
"""One number for all, or one for each stage or boundary."""


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Seconds that one micro-batch takes on each stage."""

    forward: PerStage
    backward: PerStage
    """The whole backward. A schedule that splits it computes the gradients of the weights in half of it."""


@dataclass(frozen=True, kw_only=True)
class ChannelTiming:
    """One direction over all boundaries: frames, links and codecs. A field has one number, or one for each boundary."""

    nbytes: PerStage
    """Bytes of a frame, header included."""
    bandwidth: PerStage = float("inf")
    """Bits a second."""
    latency: PerStage = 0.0
    """Seconds from the departure of a byte to its arrival."""
    duplex: PerStage = 1.0
    """Share of the bandwidth that remains while the other direction of the link carries a frame."""
    encode: PerStage = 0.0
    """Seconds of the sending stage for a frame."""
    decode: PerStage = 0.0
    """Seconds of the receiving stage for a frame."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Course:
    """The times of all events: seconds from the start of the step, arrays of [actions] or [processes]."""

    table: Timetable
    start: Seconds = field(repr=False)
    """[actions]: when each began to decode, or to compute if it decodes nothing."""
    end: Seconds = field(repr=False)
    """[actions]: when each had computed and encoded its output."""
    departure: Seconds = field(repr=False)
    """[actions]: when the first byte of its output left; `end` if it sends nothing to another process."""
    arrival: Seconds = field(repr=False)
    """[actions]: when its output had arrived."""
    latency: Seconds = field(repr=False)
    """[actions]: seconds from its last byte's departure to its arrival."""
    seconds: float
    """The whole step, fill and drain included."""
    busy: Seconds
    """[processes]: seconds of compute, encoding and decoding."""
    wait: Seconds
    """[processes]: idle seconds while the needed frame was on the wire or in its queue."""
    bubble: Seconds
    """[processes]: other idle seconds: before the first action, while the neighbour computed, or after the last."""


def time_step(table: Timetable, compute: Compute, activations: ChannelTiming, gradients: ChannelTiming) -> Course:
    """Simulate one step.

    Args:
        table: the order of the schedule.
        compute: the seconds of each stage.
        activations: entry i is boundary i, from stage i to i + 1.
        gradients: entry i is boundary i, from stage i + 1 to i.

    Raises:
        ValueError: the length of a list is not the number of stages or boundaries.
    """
    costs = _action_costs(table, compute, activations, gradients)
    course = _run(table, costs, costs.on_wire)
    for _ in range(_ROUNDS if costs.loaded.any() else 0):
        slowed = costs.on_wire / (1 - costs.loaded * _shared(course, costs))
        course = _run(table, costs, slowed)
    return course


@dataclass(frozen=True, kw_only=True, eq=False)
class _Costs:
    """What each action takes, arrays of [actions]; seconds."""

    duration: Seconds
    """Decoding, compute and encoding."""
    on_wire: Seconds
    """Bytes over bandwidth of the output; 0 if it stays on its process."""
    latency: Seconds
    loaded: Seconds
    """The share of the bandwidth that is lost while the other direction of the link is busy."""
    link: NDArray[np.int64]
    """The number of the link, one direction between two processes, that carries the output."""
    crosses: NDArray[np.bool_]
    """Whether the output goes to another process."""


def _action_costs(table: Timetable, compute: Compute, activations: ChannelTiming, gradients: ChannelTiming) -> _Costs:
    """What each action takes."""
    forward, backward = (_each(seconds, table.num_stages) for seconds in (compute.forward, compute.backward))
    by_kind = np.stack([forward, backward, backward / 2, backward / 2])  # in the order of the kinds of action
    decode = np.where(table.needs < table.nothing, _by_taking(table, activations, gradients, "decode"), 0.0)
    gives = table.gives < table.nothing
    encode = np.where(gives, _by_giving(table, activations, gradients, "encode"), 0.0)
    link, crosses = _links(table)
    bits = 8 * _by_giving(table, activations, gradients, "nbytes")
    return _Costs(
        duration=decode + by_kind[table.kind, table.stage] + encode,
        on_wire=np.where(crosses, bits / _by_giving(table, activations, gradients, "bandwidth"), 0.0),
        latency=np.where(crosses, _by_giving(table, activations, gradients, "latency"), 0.0),
        loaded=np.where(crosses, 1 - _by_giving(table, activations, gradients, "duplex"), 0.0),
        link=link,
        crosses=crosses,
    )


def _run(table: Timetable, costs: _Costs, on_wire: Seconds) -> Course:
    """The course of the step, if the frame of each action keeps a link busy for `on_wire`."""
    free, link_free = np.zeros(table.num_processes), np.zeros(int(costs.link.max()) + 1)
    arrived, sent = np.zeros((2, table.nothing + 1))
    start, idle_from, departure = np.empty((3, len(table.kind)))
    flight = on_wire + costs.latency
    for first, last in zip(table.rounds[:-1].tolist(), table.rounds[1:].tolist(), strict=True):
        now = slice(first, last)
        process, needs, way, gave = table.process[now], table.needs[now], costs.link[now], table.gives[now]
        idle_from[now] = begun = free[process]
        begun = np.maximum(begun, arrived[needs])
        start[now] = begun
        ended = begun + costs.duration[now]
        free[process] = ended
        leaves = np.maximum(ended, link_free[way])
        departure[now] = leaves
        link_free[way] = leaves + on_wire[now]
        arrived[gave] = leaves + flight[now]
        sent[gave] = ended
        arrived[-1] = sent[-1] = 0.0  # the message that is always there
    end = start + costs.duration
    seconds = float(end.max())
    busy = _summed(table, costs.duration)
    wait = _summed(table, np.maximum(0.0, start - np.maximum(idle_from, sent[table.needs])))
    return Course(
        table=table,
        start=start,
        end=end,
        departure=departure,
        arrival=departure + flight,
        latency=costs.latency,
        seconds=seconds,
        busy=busy,
        wait=wait,
        bubble=np.maximum(0.0, seconds - busy - wait),
    )


def _shared(course: Course, costs: _Costs) -> Seconds:
    """The share of each frame's time on its link in which the other direction was busy too, [actions]."""
    link = costs.link
    source, target = np.divmod(link, course.table.num_processes)
    numbers = np.unique(np.concatenate([link, other := target * course.table.num_processes + source]))
    begin, end = course.departure, course.arrival - costs.latency
    # Put all links one after another on one axis; `busy` is the busy time up to each point of that axis.
    offset = (course.seconds + end.max()) * np.searchsorted(numbers, link)
    order = np.argsort(begin + offset, kind="stable")
    axis = np.stack([(begin + offset)[order], (end + offset)[order]], axis=1).reshape(-1)
    spent = np.cumsum((end - begin)[order])
    busy = np.stack([spent - (end - begin)[order], spent], axis=1).reshape(-1)
    there = (course.seconds + end.max()) * np.searchsorted(numbers, other)
    both = np.interp(end + there, axis, busy) - np.interp(begin + there, axis, busy)
    share: Seconds = np.divide(both, end - begin, out=np.zeros_like(both), where=end > begin)
    return share


def _summed(table: Timetable, seconds: Seconds) -> Seconds:
    """The sum of the seconds of all actions of a process, [processes]."""
    return np.bincount(table.process, seconds, table.num_processes).astype(np.float64)


def _each(given: PerStage, count: int) -> Seconds:
    """The numbers as an array of `count`. ValueError if there is neither one for all nor one for each."""
    numbers = np.asarray(given, dtype=np.float64)
    if numbers.ndim and numbers.shape != (count,):
        raise ValueError(f"give one number for all, or {count}, one for each; got {numbers.size}")
    return np.broadcast_to(numbers, (count,))


def _by_giving(table: Timetable, activations: ChannelTiming, gradients: ChannelTiming, name: str) -> Seconds:
    """A field of the channel and boundary that each action sends over; without a meaning if it sends nothing."""
    return _of_boundary(table, activations, gradients, name, table.stage, table.stage - 1)


def _by_taking(table: Timetable, activations: ChannelTiming, gradients: ChannelTiming, name: str) -> Seconds:
    """A field of the channel and boundary that each action receives from; without a meaning if it receives nothing."""
    return _of_boundary(table, activations, gradients, name, table.stage - 1, table.stage)


def _of_boundary(
    table: Timetable,
    activations: ChannelTiming,
    gradients: ChannelTiming,
    name: str,
    of_forwards: NDArray[np.int64],
    of_backwards: NDArray[np.int64],
) -> Seconds:
    boundaries = table.num_stages - 1
    if not boundaries:
        return np.ones(len(table.stage))
    forth, back = (_each(getattr(channel, name), boundaries) for channel in (activations, gradients))
    last = boundaries - 1
    return np.where(table.kind == FORWARD, forth[np.clip(of_forwards, 0, last)], back[np.clip(of_backwards, 0, last)])


def _links(table: Timetable) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The link of each action's output, and whether the output crosses to another process.

    A link is one direction between two processes. Several boundaries between the same two processes share it. Outputs
    that stay on their process have their own link, which takes no time.
    """
    neighbour = np.where(table.kind == FORWARD, table.stage + 1, table.stage - 1)
    target = table.process_of[np.clip(neighbour, 0, table.num_stages - 1)]
    crosses = (table.gives < table.nothing) & (target != table.process)
    return table.process * table.num_processes + np.where(crosses, target, table.process), crosses
