"""JSON values between processes. torch pickles the objects that it sends, and reading a pickle can run code.

Lengths go first, so that no process allocates more than `LARGEST` bytes for another one.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.pipeline.errors import WireError
from thinwire.pipeline.transport import ProcessGroupReceiver, ProcessGroupSender, reaching

LARGEST = 1 << 28
"""Most bytes that one process may send at a time."""
SMALL = 1 << 20
"""Most bytes of a word."""
_TAG = 1  # the tag of words; clocks are compared in the same group with 0
_LENGTH = 8  # bytes that say how long the word behind them is


def all_gather_json(mine: Any, what: str, group: dist.ProcessGroup | None = None) -> list[Any]:
    """One JSON value of every process of a group, in their order; None is the default group.

    Raises WireError if a process sends something else, and PeerError, which names `what`, if one sends nothing.
    """
    if dist.get_world_size(group) == 1:  # as in a simulation, which would wait for gloo's threads
        return [json.loads(json.dumps(mine))]
    body, lengths = _announced(mine, what, group)
    everyone = [torch.empty_like(body) for _ in lengths]
    with reaching(what):
        dist.all_gather(everyone, body, group)
    return _read(everyone, lengths)


def gather_json(mine: Any, to: int, what: str, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """As `all_gather_json`, but for process `to` (of the default group) alone; None elsewhere."""
    if dist.get_world_size(group) == 1:
        return all_gather_json(mine, what, group)
    body, lengths = _announced(mine, what, group)
    everyone = [torch.empty_like(body) for _ in lengths] if dist.get_rank() == to else None
    with reaching(what):
        dist.gather(body, everyone, dst=to, group=group)
    return None if everyone is None else _read(everyone, lengths)


class Words:
    """JSON values of at most `SMALL` bytes that the processes of a group send to one of them, and do not wait for.

    Args:
        group: the group; None is the default group.
        to: the process that gets them, by its rank in the default group.
        timeout: of a wait.
    """

    def __init__(self, group: dist.ProcessGroup | None, to: int, timeout: timedelta) -> None:
        group = group or dist.group.WORLD
        assert group is not None, "torch.distributed is initialized"
        ranks = dist.get_process_group_ranks(group)
        mine, self._names = dist.get_rank(), {ranks.index(rank): rank for rank in ranks if rank != to}
        of_peer: dict[str, Any] = {"group": group, "tag": _TAG, "timeout": timeout}
        self._sender = None if mine == to else ProcessGroupSender(SMALL, peer=ranks.index(to), **of_peer)
        froms = self._names if mine == to else ()
        self._receivers = {peer: ProcessGroupReceiver(SMALL, peer=peer, **of_peer) for peer in froms}

    def expect(self, what: str) -> None:
        """Make room for the next word of each process. A PeerError names `what`."""
        for receiver in self._receivers.values():
            receiver.post(1, what)

    def say(self, mine: Any, what: str) -> list[Any] | None:
        """Send a word, or, in the process that gets them, wait for those of the others: all, in rank order.

        None in the other processes. Raises WireError if a process sends something else, and PeerError, which names
        `what`, if one sends nothing.
        """
        if self._sender is not None:
            body = json.dumps(mine).encode()
            assert len(body) <= SMALL - _LENGTH, f"a word has at most {SMALL - _LENGTH} bytes, got {len(body)}"
            self._sender.flush()
            buffer = self._sender.take()
            written = torch.frombuffer(bytearray(len(body).to_bytes(_LENGTH, "little") + body), dtype=torch.uint8)
            buffer[: len(written)] = written
            self._sender.send(buffer, len(written), what)
            return None
        words = {dist.get_rank(): mine}
        for peer, receiver in self._receivers.items():
            buffer = receiver.receive(what)
            length = int.from_bytes(buffer[:_LENGTH].numpy().tobytes(), "little")
            words[self._names[peer]] = _parsed(self._names[peer], buffer[_LENGTH:], length)
            receiver.give(buffer)
        return [words[rank] for rank in sorted(words)]


def _announced(mine: Any, what: str, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """The bytes of this process, padded to the longest of all, and the length of each."""
    body = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    announced = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    with reaching(what):
        dist.all_gather(announced, torch.tensor([len(body)]), group)
    lengths = [int(length) for length in announced]
    for rank, length in enumerate(lengths):
        if not 0 < length <= LARGEST:
            raise WireError(f"process {rank} must send 1 to {LARGEST} bytes at a time, got {length}")
    return torch.nn.functional.pad(body, (0, max(lengths) - len(body))), lengths


def _read(bodies: list[Tensor], lengths: list[int]) -> list[Any]:
    return [_parsed(rank, body, length) for rank, (body, length) in enumerate(zip(bodies, lengths, strict=True))]


def _parsed(rank: int, body: Tensor, length: int) -> Any:
    try:
        return json.loads(bytes(body[:length].numpy()))
    except (ValueError, RecursionError) as error:
        raise WireError(f"process {rank} must send JSON, but sent something else: {error}") from error
