"""The time of the exchange of gradients between replicas: the bytes of its frames, and a recurrence over its buckets.

    process   | encode 0, 1, 2 | add up 0, encode | add up 1, encode | ... | decode 0 | decode 1 | ...
    wire        | parts 0 | parts 1 | parts 2 | sums 0 | sums 1 | sums 2 |

All replicas of a stage begin at the same time, when the last backward of the slowest is done, and do the same. So one
of them stands for all. It sends and receives equally much at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import numpy as np

from thinwire.compress import parse
from thinwire.launch.shared.links import Network
from thinwire.launch.timing.step_time import Course
from thinwire.pipeline.replicas.division import BUCKET, divide
from thinwire.pipeline.replicas.layout import FLAT, Layout


@dataclass(frozen=True, kw_only=True)
class ReplicaWork:
    """What the replicas of a pipeline exchange in an optimizer step. All replicas are alike."""

    count: int
    gradients: str
    """The codec of the gradients of weights, as an expression."""
    elements: tuple[int, ...]
    """The weights that each process of a pipeline trains."""
    layout: Layout = FLAT
    """The rows of an exchange."""
    to_all: bool = False
    """Whether each replica sends everything to all, and adds up for itself, so that no sums are sent."""
    clips: bool = False
    """Whether all stages wait for the norm of all gradients before they go on."""
    encode: float = 0.0
    """Seconds to encode an element."""
    decode: float = 0.0
    """Seconds to decode an element."""

    def buckets(self, process: int) -> tuple[BucketLoad, ...]:
        """The loads of a process, by bucket."""
        return loads(self.elements[process], self.count, self.gradients, self.layout, self.to_all)


@dataclass(frozen=True)
class BucketLoad:
    """The frames that one replica sends of one bucket as parts, or as sums: equally many, and equally long.

    Without sums, those that it sends of the whole bucket.
    """

    elements: int
    nbytes: int
    """Of all frames, to all other replicas."""
    longest: int
    """Bytes of the longest frame."""


@dataclass(frozen=True, kw_only=True)
class ExchangeTime:
    """The exchange in a step; seconds."""

    ends: tuple[float, ...]
    """When each process has the sums."""
    adds: float
    """What the exchange adds to the step."""


@lru_cache(maxsize=256)
def loads(
    elements: int, count: int, gradients: str, layout: Layout = FLAT, to_all: bool = False
) -> tuple[BucketLoad, ...]:
    """The loads of the replica with the most bytes, by bucket."""
    method, found = parse(gradients), []
    for bucket in divide(ceil(elements / layout.row), count, BUCKET // layout.row):
        whole = len(bucket.rows)
        if to_all:
            length = layout.frame_bytes(whole, method)
            found.append(BucketLoad(whole * layout.row, (count - 1) * length, length))
            continue
        lengths = [layout.frame_bytes(len(part), method) for part in bucket.parts if part]
        # as parts, a frame to each other owner; as sums, its own part to each other replica
        own = min(lengths) if len(lengths) == count else 0
        most = max(sum(lengths) - own, (count - 1) * max(lengths))
        found.append(BucketLoad(whole * layout.row, most, max(lengths)))
    return tuple(found)


def time_exchange(work: ReplicaWork, course: Course, network: Network) -> ExchangeTime:
    """The exchange after the pass whose course is given."""
    ends = [done + seconds_alone(work, process, network) for process, done in enumerate(course.done)]
    # without a norm to wait for, a later stage is needed in the next step only when its first input arrives
    period = max(ends) if work.clips else max(end - begun for begun, end in zip(course.begun, ends, strict=True))
    return ExchangeTime(ends=tuple(ends), adds=max(0.0, period - course.seconds))


def seconds_alone(work: ReplicaWork, process: int, network: Network) -> float:
    """Seconds of the exchange of a process, which all replicas begin together."""
    buckets = work.buckets(process)
    encode, decode, latency = work.encode, work.decode, network.latency
    now, wire, parts, sums = 0.0, 0.0, np.zeros(len(buckets)), np.zeros(len(buckets))
    # 1. encode all parts; each frame leaves as soon as the wire is free
    for index, load in enumerate(buckets):
        now += encode * load.elements
        wire = max(wire, now) + _on_wire(load, network)
        parts[index] = wire + latency
    if work.to_all:
        for index, load in enumerate(buckets):
            now = max(now, parts[index]) + work.count * decode * load.elements
        return float(now)
    # 2. add up the own part of each bucket: it comes from all replicas, so it is as much work as the whole bucket
    for index, load in enumerate(buckets):
        now = max(now, parts[index]) + decode * load.elements + encode * load.elements / work.count
        wire = max(wire, now) + _on_wire(load, network)
        sums[index] = wire + latency
    # 3. decode all sums
    for index, load in enumerate(buckets):
        now = max(now, sums[index]) + decode * load.elements
    return float(now)


def _on_wire(load: BucketLoad, network: Network) -> float:
    """Seconds that the frames of a bucket, as parts or as sums, keep a wire busy."""
    if network.wires == "pair":  # a link to each replica, busy both ways
        return 8 * load.longest / (network.bandwidth * network.duplex)
    return 8 * load.nbytes / network.bandwidth
