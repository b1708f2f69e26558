"""JSON values between processes. torch pickles the objects that it sends, and reading a pickle can run code.

Lengths go first, so that no process allocates more than `LARGEST` bytes for another one.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.pipeline.errors import WireError
from thinwire.pipeline.transport import reaching

LARGEST = 1 << 28
"""Most bytes that one process may send at a time."""


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
    values = []
    for rank, (body, length) in enumerate(zip(bodies, lengths, strict=True)):
        try:
            values.append(json.loads(bytes(body[:length].numpy())))
        except (ValueError, RecursionError) as error:
            raise WireError(f"process {rank} must send JSON, but sent something else: {error}") from error
    return values
