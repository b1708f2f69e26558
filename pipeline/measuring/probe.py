"""The speed of a link between two processes, measured with real messages of a process group."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.pipeline.processes.collectives import all_gather_json

FIRST_BYTES, MESSAGE_BYTES, PROBE_SECONDS, PINGS = 1 << 14, 1 << 18, 0.5, 10
BOTH_SECONDS = 2.0
"""Seconds for both directions together. Their rates settle slowly and differ each time, so the mean counts."""


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """The speed of one direction, from one process to another."""

    goodput: float
    """Bytes of messages a second."""
    latency: float
    """Seconds that a tiny message takes."""
    duplex: float = 1.0
    """Share of the goodput that is left while the other direction is busy too."""


def probe(source: int, target: int, group: dist.ProcessGroup | None = None) -> LinkSpeed:
    """Measure the link from one rank to another while nothing else uses it. All ranks get the result; collective."""
    rank, tiny = dist.get_rank(group), torch.zeros(1)
    dist.barrier(group)
    round_trips = []
    for _ in range(PINGS):
        started = time.perf_counter()
        _exchange(tiny, rank, source, target, group)
        _exchange(tiny, rank, target, source, group)
        round_trips.append(time.perf_counter() - started)

    def send(message: Tensor, count: int) -> None:
        # all at once, as frames are: over zmq a send of so many bytes is done when the other process has the message
        if rank == source:
            works = [dist.isend(message, group=group, group_dst=target) for _ in range(count)]
        elif rank == target:
            works = [dist.irecv(message, group=group, group_src=source) for _ in range(count)]
        else:
            works = []
        for work in works:
            assert work is not None
            work.wait()
        _exchange(tiny, rank, target, source, group)

    goodput = _goodput(send, [source], PROBE_SECONDS, min, group)
    return LinkSpeed(goodput=goodput, latency=_of_rank(source, statistics.median(round_trips) / 2, group))


def probe_both(one: int, other: int) -> float:
    """Measure a link with both directions busy: bytes a second in each. All ranks get the result; collective.

    It may be less than the speed of one direction alone: acknowledgements of one wait behind the bytes of the other.
    """
    rank = dist.get_rank()

    def exchange(message: Tensor, count: int) -> None:
        if rank not in (one, other):
            return
        peer = one + other - rank
        arriving = [torch.empty_like(message) for _ in range(2)]
        works = [
            work
            for index in range(count)
            for work in (dist.irecv(arriving[index % 2], peer), dist.isend(message, peer))
        ]
        for work in works:
            assert work is not None
            work.wait()

    dist.barrier()
    return _goodput(exchange, (one, other), BOTH_SECONDS, statistics.mean, None)


def _goodput(
    send: Callable[[Tensor, int], None],
    timed: Sequence[int],
    least: float,
    of_two: Callable[[tuple[float, float]], float],
    group: dist.ProcessGroup | None,
) -> float:
    """Bytes a second of `send(message, count)`. A time is the mean over the ranks in `timed`.

    The number of bytes doubles, from `FIRST_BYTES`, in messages of up to `MESSAGE_BYTES`, until they take `least`
    seconds. Then they are sent once more, and `of_two` makes one time of the last two. So a fast burst at the start
    does not count; and if `of_two` is `min`, a stall does not count.
    """

    def seconds(nbytes: int) -> float:
        message = torch.zeros(min(nbytes, MESSAGE_BYTES), dtype=torch.uint8)
        started = time.perf_counter()
        send(message, nbytes // len(message))
        taken = time.perf_counter() - started
        return statistics.mean(_of_rank(rank, taken, group) for rank in timed)

    nbytes, spent = FIRST_BYTES // 2, 0.0
    while spent < least:
        nbytes *= 2
        spent = seconds(nbytes)
        if spent >= least:
            spent = of_two((spent, seconds(nbytes)))
    return nbytes / spent


def _exchange(message: Tensor, rank: int, source: int, target: int, group: dist.ProcessGroup | None) -> None:
    if rank == source:
        dist.send(message, group=group, group_dst=target)
    elif rank == target:
        dist.recv(message, group=group, group_src=source)


def _of_rank(rank: int, value: float, group: dist.ProcessGroup | None) -> float:
    """Give the number of one process to all processes."""
    return float(all_gather_json(value, f"waiting for what process {rank} has measured", group)[rank])
