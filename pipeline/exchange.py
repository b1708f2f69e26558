"""JSON values between processes. torch pickles the objects that it sends, and reading a pickle can run code.

Lengths go first, so that no process allocates more than `LARGEST` bytes for another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
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
_TAG = 1  # the tag of words; in the default group clocks are compared with 0
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
        what: says in words what goes from a process, by that rank; a PeerError names it.
        timeout: of a wait.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, to: int, what: Callable[[int], str], timeout: timedelta
    ) -> None:
        group = group or dist.group.WORLD
        assert group is not None, "torch.distributed is initialized"
        ranks, mine = dist.get_process_group_ranks(group), dist.get_rank()
        of_peer: dict[str, Any] = {"group": group, "tag": _TAG, "timeout": timeout}
        self._what = what
        self._sender = None if mine == to else ProcessGroupSender(SMALL, peer=ranks.index(to), **of_peer)
        self._receivers = {
            rank: ProcessGroupReceiver(SMALL, peer=place, **of_peer)
            for place, rank in enumerate(ranks)
            if mine == to != rank
        }

    def expect(self) -> None:
        """Make room for the next word of each process, in the process that gets them."""
        for rank, receiver in self._receivers.items():
            receiver.post(1, self._what(rank))

    def say(self, mine: Any) -> None:
        """Send a word, in the other processes."""
        if self._sender is None:
            return
        body = json.dumps(mine).encode()
        assert len(body) <= SMALL - _LENGTH, f"a word has at most {SMALL - _LENGTH} bytes, got {len(body)}"
        self._sender.flush()
        buffer = self._sender.take()
        written = torch.frombuffer(bytearray(len(body).to_bytes(_LENGTH, "little") + body), dtype=torch.uint8)
        buffer[: len(written)] = written
        self._sender.send(buffer, len(written), self._what(dist.get_rank()))

    def hear(self) -> list[Any]:
        """The oldest word of each process, in the process that gets them; it waits for those that have not arrived.

        Raises WireError if a process sent something else, and PeerError if one sends nothing.
        """
        words = []
        for rank, receiver in self._receivers.items():
            buffer = receiver.receive(self._what(rank))
            length = int.from_bytes(buffer[:_LENGTH].numpy().tobytes(), "little")
            words.append(_parsed(rank, buffer[_LENGTH:], length))
            receiver.give(buffer)
        return words


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
