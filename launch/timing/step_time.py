r"""One step of a pipeline, simulated event by event: how long it takes, and how long each process computes and waits.

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

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.launch.timing.timetable import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Timetable

_ROUNDS = 6
"""Rounds of the search for how much frames slow each other; after 6, changes were below 1e-4 of a step."""

Seconds = NDArray[np.float64]


class Frame(NamedTuple):
    """A frame over a boundary in one direction; seconds, but for `lost`."""

    on_wire: float
    """Its bytes over the bandwidth."""
    latency: float
    lost: float
    """The share of the bandwidth that is lost while the other direction of the link is busy."""
    encode: float
    decode: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Course:
    """What a step takes: seconds from its start, arrays of [actions] or [processes]."""

    table: Timetable
    departure: Seconds = field(repr=False)
    """[actions]: when the first byte of its output left; its end if it sends nothing to another process."""
    sent: Seconds = field(repr=False)
    """[actions]: when its last byte had left."""
    seconds: float
    """The whole step, fill and drain included."""
    busy: Seconds
    """[processes]: seconds of compute, encoding and decoding."""
    wait: Seconds
    """[processes]: idle seconds while the needed frame was on the wire or in its queue."""
    bubble: Seconds
    """[processes]: other idle seconds: before the first action, while the neighbour computed, or after the last."""


_NOTHING = Frame(0.0, 0.0, 0.0, 0.0, 0.0)


def time_step(
    table: Timetable,
    forward: Sequence[float],
    backward: Sequence[float],
    activations: Sequence[Frame],
    gradients: Sequence[Frame],
) -> Course:
    """Simulate one step.

    Args:
        table: the schedule.
        forward: seconds of one micro-batch forward on each stage.
        backward: seconds of the whole backward there. A schedule that splits it computes the gradients of the weights
            in half of it.
        activations: the frame over each boundary; entry i is from stage i to i + 1.
        gradients: the same back, from stage i + 1 to i.
    """
    # seconds that each action decodes, computes and encodes, and the frame that it sends to another process
    durations, sent = list[float](), list[Frame]()
    for action in table.actions:
        stage = action.stage
        if action.kind == FORWARD:
            seconds, frames, taken, given = forward[stage], activations, stage - 1, stage
        else:
            seconds, frames, taken, given = backward[stage], gradients, stage, stage - 1
            seconds = seconds / 2 if action.kind in (BACKWARD_INPUT, BACKWARD_WEIGHT) else seconds
        decode = 0.0 if action.source is None else frames[taken].decode
        frame = _NOTHING if action.target is None else frames[given]
        durations.append(decode + seconds + frame.encode)
        sent.append(_NOTHING if action.target == action.process else frame)
    on_wire, lost = (np.array([getattr(frame, name) for frame in sent]) for name in ("on_wire", "lost"))
    course = _run(table, durations, sent, on_wire)
    for _ in range(_ROUNDS if lost.any() else 0):
        course = _run(table, durations, sent, on_wire / (1 - lost * _both_ways(course)))
    return course


def _run(table: Timetable, durations: Sequence[float], sent: Sequence[Frame], on_wire: Seconds) -> Course:
    """The course of the step, if the frame of each action keeps a link busy for `on_wire`."""
    done, busy, wait = ([0.0] * table.num_processes for _ in range(3))
    link_free = defaultdict[tuple[int, int | None], float](float)
    end, departure, arrival = (list[float]() for _ in range(3))
    for action, duration, frame, carried in zip(table.actions, durations, sent, on_wire.tolist(), strict=True):
        process, idle_from = action.process, done[action.process]
        given, there = (0.0, 0.0) if action.source is None else (end[action.source], arrival[action.source])
        begins = there if there > idle_from else idle_from
        ends = leaves = begins + duration
        if frame is not _NOTHING:
            link = process, action.target
            leaves = max(ends, link_free[link])
            link_free[link] = leaves + carried
        if begins > given:
            wait[process] += begins - max(idle_from, given)
        done[process] = ends
        busy[process] += duration
        end.append(ends)
        departure.append(leaves)
        arrival.append(leaves + (carried + frame.latency))
    seconds = max(done)
    return Course(
        table=table,
        departure=np.array(departure),
        sent=np.array(departure) + on_wire,
        seconds=seconds,
        busy=np.array(busy),
        wait=np.array(wait),
        bubble=np.maximum(0.0, seconds - np.array(busy) - np.array(wait)),
    )


def _both_ways(course: Course) -> Seconds:
    """The share of each frame's time on its link in which the other direction was busy too, [actions]."""
    on_link = defaultdict[tuple[int, int | None], list[int]](list)
    for index, action in enumerate(course.table.actions):
        on_link[action.process, action.target].append(index)
    begin, end = course.departure, course.sent
    share = np.zeros(len(begin))
    for (source, target), own in on_link.items():
        if target in (None, source) or not (other := on_link.get((target, source))):
            continue
        # the busy time of the other direction, up to the end of each frame
        spent = np.cumsum(end[other] - begin[other])
        axis = np.stack([begin[other], end[other]], axis=1).reshape(-1)
        busy = np.stack([spent - (end[other] - begin[other]), spent], axis=1).reshape(-1)
        both = np.interp(end[own], axis, busy) - np.interp(begin[own], axis, busy)
        span = end[own] - begin[own]
        share[own] = np.divide(both, span, out=np.zeros_like(both), where=span > 0)
    return share
