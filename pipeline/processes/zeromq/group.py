"""The process group `zmq`: torch's point-to-point messages and the collectives that Thinwire uses, over a Mesh.

A send is done when the other process has the message. Messages with one tag between two processes arrive complete, once
and in order, as long as both processes live, even if connections break. If a process ends, or cannot be reached for
longer than the time-out, the wait ends with an error. If a message is longer than the buffer of its receive, the
receiver gets an error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
import zmq
from torch import Tensor

from thinwire.pipeline.errors import MismatchError, OptionsError, WireError
from thinwire.pipeline.processes import posts
from thinwire.pipeline.processes.addresses import interface_addresses, is_address, parted
from thinwire.pipeline.processes.transport import reaching
from thinwire.pipeline.processes.zeromq.connections import Patience
from thinwire.pipeline.processes.zeromq.keys import Keys
from thinwire.pipeline.processes.zeromq.mailbox import Pending
from thinwire.pipeline.processes.zeromq.mesh import Address, Mesh
from thinwire.pipeline.processes.zeromq.packets import Stream

BACKEND = "zmq"
"""The name of this kind of process group in torch."""

_COLLECTIVE = -1
"""The tag of collectives: all processes call them in one order."""

_FOLDS = (
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.MIN, torch.minimum),
    (dist.ReduceOp.MAX, torch.maximum),
)
"""The function that joins two tensors, by operation. torch's schedules need MIN; nothing here needs others."""


@dataclass(frozen=True)
class _Wait:
    """A transfer that is not done: its description, and the other process as a rank of the mesh."""

    pending: Pending
    what: str
    peer: int


class GroupWork(dist.Work):
    """The transfers of one call of the group."""

    def __init__(
        self, mesh: Mesh, waits: Sequence[_Wait], timeout: timedelta, finish: Callable[[], object] | None = None
    ) -> None:
        super().__init__()
        self._mesh, self._waits, self._timeout, self._finish = mesh, tuple(waits), timeout, finish

    def is_completed(self) -> bool:
        """Whether `wait` returns or raises without waiting."""
        return all(wait.pending.ended for wait in self._waits)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all is done. RuntimeError if it fails, or takes longer than `timeout` (None: the group's)."""
        allowed = (timeout or self._timeout).total_seconds()
        deadline = time.monotonic() + allowed
        for wait in self._waits:
            if not wait.pending.wait(max(0.0, deadline - time.monotonic())):
                between = self._mesh.describe(wait.peer)
                raise RuntimeError(f"{wait.what} process {wait.peer} took longer than {allowed:g} s ({between})")
            if wait.pending.error is not None:
                raise RuntimeError(f"{wait.what} process {wait.peer} failed: {wait.pending.error}")
        if self._finish is not None:
            self._finish()
            self._finish = None
        return True


class Group(dist.ProcessGroup):
    """A process group over a Mesh, which several groups may share.

    Args:
        mesh: the mesh of this process.
        ranks: the ranks of the group's processes in the mesh, in the order of the group.
        name: the name of the group, the same in all processes.
        timeout: the most seconds of a wait.
    """

    def __init__(self, mesh: Mesh, ranks: Sequence[int], name: str, timeout: timedelta) -> None:
        super().__init__(ranks.index(mesh.rank), len(ranks))
        self.mesh, self._ranks, self._name, self._timeout = mesh, list(ranks), name, timeout

    def getBackendName(self) -> str:
        """The name of the group's kind in torch."""
        return BACKEND

    @property
    def group_name(self) -> str:
        """The group's name. torch keeps the names of its own groups in C++."""
        return self._name

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> GroupWork:
        """Send a tensor, which must stay as it is until the work is done."""
        [tensor] = tensors
        return self._work([self._sent(tensor, dst, tag)])

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> GroupWork:
        """Receive into a contiguous tensor. If the message is shorter, the end of the tensor does not change."""
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
            self._send(mine, [opts.rootRank])
            return self._work([])
        [gathered] = outputs
        return self._work(self._take(gathered, mine))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> GroupWork:
        """Give every process the tensor of one process."""
        [tensor] = tensors
        if self.rank() == opts.rootRank:
            self._send(tensor, self._others)
            return self._work([])
        return self._work([self._received(tensor, opts.rootRank, _COLLECTIVE)])

    def barrier(self, opts: Any = None) -> GroupWork:
        """Wait until every process calls it."""
        mine = torch.zeros(1, dtype=torch.uint8)
        return self.allgather([[torch.zeros_like(mine) for _ in range(self.size())]], [mine])

    def shutdown(self) -> None:
        """Leave the mesh, also for all groups that share it."""
        self.mesh.close()

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size()) if rank != self.rank()]

    def _work(self, waits: Sequence[_Wait], finish: Callable[[], object] | None = None) -> GroupWork:
        return GroupWork(self.mesh, waits, self._timeout, finish)

    def _collect(self, gathered: list[Tensor], mine: Tensor, finish: Callable[[], object] | None = None) -> GroupWork:
        """Send this process's tensor to all others, and receive theirs."""
        self._send(mine, self._others)
        return self._work(self._take(gathered, mine), finish)

    def _take(self, gathered: list[Tensor], mine: Tensor) -> list[_Wait]:
        gathered[self.rank()].copy_(mine)
        return [self._received(gathered[rank], rank, _COLLECTIVE) for rank in self._others]

    def _send(self, tensor: Tensor, others: Sequence[int]) -> None:
        """Send a copy without waiting: a collective waits only for the messages of the other processes."""
        kept = tensor.clone()
        for rank in others:
            self._sent(kept, rank, _COLLECTIVE)

    def _sent(self, tensor: Tensor, dst: int, tag: int) -> _Wait:
        peer = self._ranks[dst]
        return _Wait(self.mesh.send(peer, Stream.of(self._name, tag), _bytes_of(tensor)), "sending to", peer)

    def _received(self, tensor: Tensor, src: int, tag: int) -> _Wait:
        peer = self._ranks[src]
        return _Wait(self.mesh.receive(peer, Stream.of(self._name, tag), _bytes_of(tensor)), "receiving from", peer)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy."""
    assert tensor.is_contiguous(), "messages are read from and written to tensors in place"
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True, kw_only=True)
class MeshSettings:
    """The settings of a group's mesh: `pg_options` of torch.

    The processes of a group find each other through the rendezvous store, which a stranger may control. It holds
    addresses and no keys. A wrong address leads to a program without the keys, which gets no data, or to another
    process of the run, which refuses the connection.
    """

    keys: Keys
    connections: int = 1
    patience: Patience | None = None


def register() -> None:
    """Make `zmq` a backend of torch.distributed, once. Its `pg_options` are MeshSettings, or a Group to share with."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, given: MeshSettings | Group) -> Group:
    """This process's part of a new group; `options` are torch's description of the group."""
    if isinstance(given, Group):
        return Group(given.mesh, options.global_ranks_in_group, options.group_id, options.timeout)
    # the first address of the interface named for gloo, or loopback
    asked = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    interface = interface_addresses().get(asked, [asked or "127.0.0.1"])[0]
    try:
        mesh = Mesh(
            options.group_rank,
            given.keys,
            interface=interface,
            connections=given.connections,
            patience=given.patience,
        )
    except zmq.ZMQError as error:
        raise OptionsError(
            f"GLOO_SOCKET_IFNAME must name a network interface of this machine with an address, got {interface}: "
            f"{error.strerror}"
        ) from error
    mesh.add_addresses(_addresses(options.store, mesh, given.keys, options.group_size, options.timeout))
    return Group(mesh, range(options.group_size), options.group_id, options.timeout)


def _addresses(store: dist.Store, mesh: Mesh, keys: Keys, count: int, wait: timedelta) -> Mapping[int, Address]:
    """Publish the address of this process, and give the addresses of all, by rank."""
    mine = {
        "endpoint": mesh.address.endpoint,
        "life": mesh.address.life.hex(),
        "keys": keys.fingerprint,
    }
    store.set(str(mesh.rank), posts.written(mine))
    others = [rank for rank in range(count) if rank != mesh.rank]
    with reaching(
        f"process {mesh.rank} was waiting for all {count} processes to say where they listen; each must have "
        f"wire.transport zmq"
    ):
        store.wait([str(rank) for rank in others], wait)
        return {rank: _read(store.get(str(rank)), rank, keys) for rank in others}


def _read(text: bytes, rank: int, keys: Keys) -> Address:
    """The address that a process published. WireError if it is not one, MismatchError if the process has other keys."""
    told = posts.read(text, must := f"process {rank} must send its address")
    try:
        address = Address(str(told["endpoint"]), bytes.fromhex(told["life"]))
        fingerprint = str(told["keys"])
    except (ValueError, TypeError, KeyError) as error:
        raise WireError(f"{must}, and sent something else: {error}") from error
    if not _is_endpoint(address.endpoint) or len(address.life) != 16:
        raise WireError(f"{must}, and sent {address.endpoint[:80]!r}")
    if fingerprint != keys.fingerprint:
        raise MismatchError(f"process {rank} has other keys; give every process the same file as wire.keys")
    return address


def _is_endpoint(text: str) -> bool:
    """Whether a socket can connect there: to an address and a port."""
    with suppress(ValueError):
        return text.startswith("tcp://") and is_address(parted(text.removeprefix("tcp://"))[0])
    return False
