"""The process group `zmq`: torch's point-to-point messages and the collectives that Thinwire uses, over a Network.

A send is done when the other process has the message. Messages between two processes with one tag arrive in order,
whole and once, however often their connections break, as long as both processes live; a process that ends, or is out
of reach for longer than the time-out, ends the wait with an error. A message that is longer than the buffer of its
receive is an error at the receiver.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.pipeline.zeromq.messages import Pending
from thinwire.pipeline.zeromq.network import Network
from thinwire.pipeline.zeromq.packets import Channel

BACKEND = "zmq"
"""What torch calls this kind of process group."""

_COLLECTIVE = -1
"""The tag of collectives: all processes call them in one order."""

_FOLDS = (
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.MIN, torch.minimum),
    (dist.ReduceOp.MAX, torch.maximum),
)
"""How two tensors become one, by operation; torch's schedules take votes by MIN, and nothing here asks for others."""


@dataclass(frozen=True)
class _Wait:
    """Something under way, in words, and with whom: a rank of the network."""

    pending: Pending
    what: str
    peer: int


class GroupWork(dist.Work):
    """What a call of the group has under way."""

    def __init__(
        self, network: Network, waits: Sequence[_Wait], timeout: timedelta, finish: Callable[[], object] | None = None
    ) -> None:
        super().__init__()
        self._network, self._waits, self._timeout, self._finish = network, tuple(waits), timeout, finish

    def is_completed(self) -> bool:
        """Whether `wait` returns, or raises, at once."""
        return all(wait.pending.ended for wait in self._waits)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is done. RuntimeError if it fails, or is not done within `timeout`, or that of the group."""
        allowed = (timeout or self._timeout).total_seconds()
        deadline = time.monotonic() + allowed
        for wait in self._waits:
            if not wait.pending.wait(max(0.0, deadline - time.monotonic())):
                between = self._network.describe(wait.peer)
                raise RuntimeError(f"{wait.what} process {wait.peer} took longer than {allowed:g} s ({between})")
            if wait.pending.error is not None:
                raise RuntimeError(f"{wait.what} process {wait.peer} failed: {wait.pending.error}")
        if self._finish is not None:
            self._finish()
            self._finish = None
        return True


class Group(dist.ProcessGroup):
    """A process group over a Network, which several groups may share.

    Args:
        network: that of this process.
        ranks: those of the group's processes in the network, in the order of the group.
        name: of the group, the same in all processes.
        timeout: for which a wait lasts at most.
    """

    def __init__(self, network: Network, ranks: Sequence[int], name: str, timeout: timedelta) -> None:
        super().__init__(ranks.index(network.rank), len(ranks))
        self.network, self._ranks, self._name, self._timeout = network, list(ranks), name, timeout

    def getBackendName(self) -> str:
        """The name that torch knows the group's kind by."""
        return BACKEND

    @property
    def group_name(self) -> str:
        """The group's name; torch keeps that of its own groups in C++."""
        return self._name

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> GroupWork:
        """Send a tensor, which must stay as it is until the work is done."""
        [tensor] = tensors
        return self._work([self._sent(tensor, dst, tag)])

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> GroupWork:
        """Receive into a contiguous tensor; a shorter message leaves its end as it is."""
        [tensor] = tensors
        return self._work([self._received(tensor, src, tag)])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> GroupWork:
        """Give every process the tensor of every process, in the order of the group."""
        [gathered], [mine] = outputs, inputs
        return self._collect(gathered, mine)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> GroupWork:
        """Give every process the sum, least or greatest of all tensors, taken in the order of the group."""
        [tensor] = tensors
        gathered = [torch.empty_like(tensor) for _ in range(self.size())]
        fold = next(fold for operation, fold in _FOLDS if opts.reduceOp == operation)
        return self._collect(gathered, tensor, lambda: tensor.copy_(reduce(fold, gathered)))

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> GroupWork:
        """Give one process the tensor of every process, in the order of the group."""
        [mine] = inputs
        if self.rank() != opts.rootRank:
            self._tell(mine, [opts.rootRank])
            return self._work([])
        [gathered] = outputs
        return self._work(self._take(gathered, mine))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> GroupWork:
        """Give every process the tensor of one process."""
        [tensor] = tensors
        if self.rank() == opts.rootRank:
            self._tell(tensor, self._others)
            return self._work([])
        return self._work([self._received(tensor, opts.rootRank, _COLLECTIVE)])

    def barrier(self, opts: Any = None) -> GroupWork:
        """Wait until every process calls it."""
        mine = torch.zeros(1, dtype=torch.uint8)
        return self.allgather([[torch.zeros_like(mine) for _ in range(self.size())]], [mine])

    def shutdown(self) -> None:
        """Leave the network; whoever shares it has left too."""
        self.network.close()

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size()) if rank != self.rank()]

    def _work(self, waits: Sequence[_Wait], finish: Callable[[], object] | None = None) -> GroupWork:
        return GroupWork(self.network, waits, self._timeout, finish)

    def _collect(self, gathered: list[Tensor], mine: Tensor, finish: Callable[[], object] | None = None) -> GroupWork:
        """Every process tells all others its tensor."""
        self._tell(mine, self._others)
        return self._work(self._take(gathered, mine), finish)

    def _take(self, gathered: list[Tensor], mine: Tensor) -> list[_Wait]:
        gathered[self.rank()].copy_(mine)
        return [self._received(gathered[rank], rank, _COLLECTIVE) for rank in self._others]

    def _tell(self, tensor: Tensor, others: Sequence[int]) -> None:
        """Send a copy, which nobody waits for: what collectives wait for is what the others say."""
        kept = tensor.clone()
        for rank in others:
            self._sent(kept, rank, _COLLECTIVE)

    def _sent(self, tensor: Tensor, dst: int, tag: int) -> _Wait:
        peer = self._ranks[dst]
        return _Wait(self.network.send(peer, self._channel(tag), _bytes_of(tensor)), "sending to", peer)

    def _received(self, tensor: Tensor, src: int, tag: int) -> _Wait:
        peer = self._ranks[src]
        return _Wait(self.network.receive(peer, self._channel(tag), _bytes_of(tensor)), "receiving from", peer)

    def _channel(self, tag: int) -> Channel:
        return Channel.of(self._name, tag)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor."""
    assert tensor.is_contiguous(), "messages are read from and written to tensors in place"
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
