"""What a link between two processes carries, measured with real messages of a process group."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

FIRST_BYTES, MESSAGE_BYTES, PROBE_SECONDS, PINGS = 1 << 14, 1 << 18, 0.5, 10


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """One direction from one process to another."""

    goodput: float
    """Bytes of messages a second."""
    latency: float
    """Seconds of a tiny message."""


def probe(source: int, target: int, group: dist.ProcessGroup | None = None) -> LinkSpeed:
    """What the link from one rank of a group to another carries, known to all; collective over the group.

    Twice as many bytes go out each time, from `FIRST_BYTES` on and in messages of up to `MESSAGE_BYTES`, until they
    take `PROBE_SECONDS`; the last time counts, so that a link's burst at first does not.
    """
    rank, tiny = dist.get_rank(group), torch.zeros(1)
    dist.barrier(group)
    round_trips = []
    for _ in range(PINGS):
        started = time.perf_counter()
        _exchange(tiny, rank, source, target, group)
        _exchange(tiny, rank, target, source, group)
        round_trips.append(time.perf_counter() - started)
    nbytes, spent = FIRST_BYTES // 2, 0.0
    while spent < PROBE_SECONDS:
        nbytes *= 2
        message = torch.zeros(min(nbytes, MESSAGE_BYTES), dtype=torch.uint8)
        started = time.perf_counter()
        for _ in range(nbytes // len(message)):
            _exchange(message, rank, source, target, group)
        _exchange(tiny, rank, target, source, group)
        spent = _said_by(source, time.perf_counter() - started, group)
    latency = _said_by(source, statistics.median(round_trips) / 2, group)
    return LinkSpeed(goodput=nbytes / spent, latency=latency)


def _exchange(message: Tensor, rank: int, source: int, target: int, group: dist.ProcessGroup | None) -> None:
    if rank == source:
        dist.send(message, group=group, group_dst=target)
    elif rank == target:
        dist.recv(message, group=group, group_src=source)


def _said_by(rank: int, value: float, group: dist.ProcessGroup | None) -> float:
    """One process's number, known to all."""
    number = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(number, group=group, group_src=rank)
    return float(number)
