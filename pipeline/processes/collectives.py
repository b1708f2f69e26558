"""What processes send each other outside frames: JSON values, numbers, times, sums. All of it crosses as notes.

  0       4      8        16       24
  | crc32 | kind | number | length | body
    u32     u32    u64      u64

All numbers are little-endian. `kind` says what the note is about. `number` counts the notes of a kind in a group, from
one process to another, or of all to all. Both ends count, and the CRC-32 covers all that follows it. So a note that is
damaged, lost or out of turn is an error. A barrier carries nothing that could be damaged.

A sum over stages is gathered and added in stage order in float64, never all-reduced, so that it does not depend on
where the stages live. Values are JSON: torch pickles the objects that it sends, and reading a pickle can run code. A
number survives JSON bit for bit.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from enum import IntEnum, unique
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from isal import isal_zlib
from torch import Tensor

from thinwire.errors.words import numbered, were
from thinwire.pipeline.errors import MismatchError, WireError
from thinwire.pipeline.processes.backends import arguments_beside
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.processes.transport import ProcessGroupReceiver, ProcessGroupSender, reaching

LARGEST = 1 << 28
"""Most bytes of a value that one process may give all others at a time."""
SMALL = 1 << 20
"""Most bytes of the note of a word."""
HEADER_BYTES = 24
_HEADER = struct.Struct("<IQQ")  # behind the checksum
_FIRST_BYTES = 256
"""Bytes of the notes that go ahead: of a value that is no longer, nothing follows."""
_LENGTH_BYTES = 8
_AHEAD = _FIRST_BYTES - HEADER_BYTES - _LENGTH_BYTES


@unique
class NoteKind(IntEnum):
    """What a note is about; its tag too, so notes of two kinds are never mixed up."""

    ALL = 0
    """A value of every process for all."""
    CLOCK = 1
    NORM = 3
    LOSSES = 4
    STEP = 5
    """What stages sent in a step, what they spent on the exchange between replicas, and their gradient norms."""
    STOP = 6
    """Whether a process was asked to stop."""


# 1. Notes

_counts: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[NoteKind, str]]] = WeakKeyDictionary()


def _next(group: dist.ProcessGroup, kind: NoteKind, way: str) -> int:
    """The number of the next note of a kind in a group that goes a way."""
    counts = _counts.setdefault(group, Counter())
    counts[kind, way] += 1
    return counts[kind, way]


def _group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = group or dist.group.WORLD
    assert group is not None, "torch.distributed is initialized"
    return group


def seal(kind: NoteKind, number: int, body: Tensor) -> Tensor:
    """A note around a body of bytes (uint8, on the host)."""
    note = torch.empty(HEADER_BYTES + len(body), dtype=torch.uint8)
    note[HEADER_BYTES:] = body
    view = note.numpy().data
    view[4:HEADER_BYTES] = _HEADER.pack(kind, number, len(body))
    view[:4] = isal_zlib.crc32(view[4:]).to_bytes(4, "little")
    return note


def opened(kind: NoteKind, number: int, note: Tensor, sender: int) -> Tensor:
    """The body of a note, which may have more bytes behind it; WireError if it is damaged, or another one."""
    view = note.numpy().data
    got_kind, got_number, length = _HEADER.unpack_from(view, 4)
    end = HEADER_BYTES + length
    if end > len(view) or isal_zlib.crc32(view[4:end]) != int.from_bytes(view[:4], "little"):
        raise WireError(f"what process {sender} sends must match its CRC-32: it was damaged or cut short on the way")
    if (got_kind, got_number) != (kind, number):
        raise WireError(
            f"process {sender} must send {kind.name} {number} now, got kind {got_kind}, number {got_number}; use the "
            f"same release in every process"
        )
    return note[HEADER_BYTES:end]


def send_numbers(kind: NoteKind, numbers: Sequence[float], to: int) -> None:
    """Send float64 to a process, by its rank in the default group, and wait until they have left."""
    body = torch.tensor(numbers, dtype=torch.float64).view(torch.uint8)
    dist.send(seal(kind, _next(_group_of(None), kind, f"to {to}"), body), to, tag=kind)


def receive_numbers(kind: NoteKind, count: int, source: int) -> list[float]:
    """Wait for the numbers that `send_numbers` in another process sends. WireError if they are damaged."""
    note = torch.zeros(HEADER_BYTES + 8 * count, dtype=torch.uint8)
    dist.recv(note, source, tag=kind)
    body = opened(kind, _next(_group_of(None), kind, f"from {source}"), note, source)
    if len(body) != 8 * count:
        raise WireError(f"process {source} must send {count} numbers, got {len(body)} bytes; use the same release")
    numbers: list[float] = body.view(torch.float64).tolist()
    return numbers


def _written(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _parsed(body: Tensor, sender: int) -> Any:
    try:
        return json.loads(bytes(body.numpy()))
    except (ValueError, RecursionError) as error:
        raise WireError(f"process {sender} must send JSON, but sent something else: {error}") from error


# 2. Values of all processes of a group


def all_gather_json(mine: Any, what: str, group: dist.ProcessGroup | None = None) -> list[Any]:
    """One JSON value of every process of a group, in their order; None is the default group.

    Raises WireError if a process sends something else, and PeerError, which names `what`, if one sends nothing.
    """
    found = gather_json(mine, None, what, group)
    assert found is not None, "every process gets them"
    return found


def gather_json(mine: Any, to: int | None, what: str, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """As `all_gather_json`, but for process `to` (of the default group) alone; None elsewhere.

    The beginnings and lengths of the values go ahead, so that there is room for them.
    """
    size = dist.get_world_size(group)
    if size == 1:  # as in a simulation, which would wait for gloo's threads
        return [json.loads(json.dumps(mine))]
    body, number = _written(mine), _next(_group_of(group), NoteKind.ALL, "")
    length = torch.tensor([len(body)]).view(torch.uint8)
    ahead = _padded(seal(NoteKind.ALL, number, torch.cat([length, body[:_AHEAD]])), _FIRST_BYTES)
    notes = [torch.empty_like(ahead) for _ in range(size)]
    with reaching(what):
        dist.all_gather(notes, ahead, group)
    bodies = [opened(NoteKind.ALL, number, note, sender) for sender, note in enumerate(notes)]
    lengths = [int.from_bytes(bytes(each[:_LENGTH_BYTES].numpy()), "little") for each in bodies]
    bodies = [each[_LENGTH_BYTES:] for each in bodies]
    for sender, length_of_one in enumerate(lengths):
        if not 0 < length_of_one <= LARGEST:
            raise WireError(f"process {sender} must send 1 to {LARGEST} bytes at a time, got {length_of_one}")
    if (longest := max(lengths)) > _AHEAD:
        rest = _padded(seal(NoteKind.ALL, number, body[_AHEAD:]), HEADER_BYTES + longest - _AHEAD)
        takes = to in (None, dist.get_rank())
        notes = [torch.empty_like(rest) for _ in range(size)] if takes else []
        with reaching(what):
            if to is None:
                dist.all_gather(notes, rest, group)
            else:
                dist.gather(rest, notes or None, dst=to, group=group)
        rests = [opened(NoteKind.ALL, number, note, sender) for sender, note in enumerate(notes)]
        bodies = [torch.cat(parts) for parts in zip(bodies, rests, strict=True)] if takes else []
    if to not in (None, dist.get_rank()):
        return None
    return [_parsed(each[:count], sender) for sender, (each, count) in enumerate(zip(bodies, lengths, strict=True))]


def _padded(note: Tensor, nbytes: int) -> Tensor:
    return torch.nn.functional.pad(note, (0, nbytes - len(note)))


# 3. Values of stages, replicas and processes


def gather(where: Placement, local: Mapping[int, Any]) -> list[Any] | None:
    """Gather one JSON value of every stage of this pipeline, in stage order, in the process of the last stage.

    None in the other processes.
    """
    what = f"{were(local)} reporting to the last stage"
    told = gather_json(list(local.items()), where.last_process, what, where.pipeline)
    return None if told is None else _by_stage(where, told)


def gather_numbers(where: Placement, local: Mapping[int, float]) -> list[float]:
    """Gather one float64 of every stage of this pipeline, in stage order, in all its processes."""
    pairs = [(stage, float(value)) for stage, value in local.items()]
    return _by_stage(where, all_gather_json(pairs, f"{were(local)} waiting for numbers of all stages", where.pipeline))


def _by_stage(where: Placement, told: Sequence[Any]) -> list[Any]:
    """The values in stage order, of the pairs of stage and value that each process of a pipeline sent."""
    found = {stage: value for pairs in told for stage, value in pairs}
    return [found[stage] for stage in range(where.num_stages)]


def everyone_across(where: Placement, mine: Any) -> list[Any]:
    """One JSON value of this process's counterparts in all replicas, in their order, in each of them."""
    if where.num_replicas == 1:
        return [mine]
    return all_gather_json(mine, f"{_here(where)} waiting for a message of the other replicas", where.across)


def everyone(where: Placement, mine: Any) -> list[Any]:
    """Gather one JSON value of every process, in rank order, in all processes."""
    return all_gather_json(mine, f"{_here(where)} waiting for a message of all processes")


def anyone(where: Placement, mine: bool) -> bool:
    """Whether any process says yes; in all processes."""
    return any(everyone(where, mine))


def barrier(where: Placement, what: str) -> None:
    """Wait until all processes are here. A PeerError says `what` if one is gone or silent."""
    with reaching(f"{_here(where)} {what}"):
        dist.barrier()


def compare(where: Placement, local: Mapping[int, Mapping[str, str]]) -> None:
    """Compare values with the same name on several stages; collective. MismatchError names the first difference."""
    known: dict[str, tuple[int, str]] = {}
    for stage, found in enumerate(gather(where, local) or ()):
        for name, value in found.items():
            other, expected = known.setdefault(name, (stage, value))
            if value != expected:
                raise MismatchError(
                    f"the buffers of {name} differ between stages {other} and {stage}, but both ends must hold "
                    f"equal ones; use the same release, torch and kind of machine at both"
                )


def compare_replicas(where: Placement, local: Mapping[int, str]) -> None:
    """Compare the digest of each stage's weights with those in the other replicas; collective.

    Raises MismatchError, in every process with that stage, if one differs.
    """
    told = everyone_across(where, [local[stage] for stage in sorted(local)])
    for place, stage in enumerate(sorted(local)):
        different = [replica for replica, digests in enumerate(told) if digests[place] != told[0][place]]
        if different:
            raise MismatchError(
                f"the weights or buffers of stage {stage} differ between replicas 0 and {different[0]}, but all "
                f"replicas must hold equal ones; use the same release, torch and kind of machine for all, and no "
                f"buffers that change in training, but for running statistics of norms"
            )


def _here(where: Placement) -> str:
    return were(where.stages_of(dist.get_rank()))


# 4. Notes that nobody waits for


class AsyncNotes:
    """Notes of at most `SMALL` bytes, a JSON value each: a process sends them to one other or to all, and goes on.

    A collective call makes room for what arrives only when it is called: over a slow link, all wait for two latencies
    after the last process has come. Here room is made before. So the process that comes last waits for nobody, and the
    others for one latency.

    Args:
        group: the group; None is the default group.
        kind: of the notes; a group has one AsyncNotes of a kind.
        what: says in words what goes from a process, by its rank in the default group; a PeerError names it.
        timeout: of a wait.
        to: the process that gets them, by its rank in the default group; None is all.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        kind: NoteKind,
        what: Callable[[int], str],
        timeout: timedelta,
        to: int | None = None,
    ) -> None:
        self._group, self._kind, self._what = _group_of(group), kind, what
        ranks, mine = dist.get_process_group_ranks(self._group), dist.get_rank()
        way: dict[str, Any] = {"group": self._group, "tag": kind, "timeout": timeout}
        others = {rank: place for place, rank in enumerate(ranks) if rank != mine}
        self._senders = {
            rank: ProcessGroupSender(SMALL, peer=place, **way)
            for rank, place in others.items()
            if to is None or to == rank
        }
        self._receivers = {
            rank: ProcessGroupReceiver(SMALL, peer=place, **way)
            for rank, place in others.items()
            if to is None or to == mine
        }

    def expect(self) -> None:
        """Make room for the next note of each process, in a process that gets them."""
        for rank, receiver in self._receivers.items():
            receiver.post(1, self._what(rank))

    def send(self, mine: Any) -> None:
        """Send a note, and wait for nobody."""
        body = _written(mine)
        assert len(body) <= SMALL - HEADER_BYTES, f"a note has at most {SMALL - HEADER_BYTES} bytes, got {len(body)}"
        for rank, sender in self._senders.items():
            note = seal(self._kind, _next(self._group, self._kind, f"to {rank}"), body)
            sender.flush()
            buffer = sender.take()
            buffer[: len(note)] = note
            sender.send(buffer, len(note), self._what(dist.get_rank()))

    def receive(self) -> list[Any]:
        """The oldest note of each other process, in a process that gets them; it waits for those not there yet.

        Raises WireError if a process sent something else, and PeerError if one sends nothing.
        """
        notes = []
        for rank, receiver in self._receivers.items():
            buffer = receiver.receive(self._what(rank))
            number = _next(self._group, self._kind, f"from {rank}")
            notes.append(_parsed(opened(self._kind, number, buffer, rank), rank))
            receiver.give(buffer)
        return notes


class StageNumbers:
    """One float64 of every stage, in all processes of a pipeline, once in a step.

    Args:
        where: the processes of the stages.
        what: the number in words, with an article; a PeerError names it.
        timeout: of a wait.
    """

    def __init__(self, where: Placement, what: str, timeout: timedelta) -> None:
        self._where = where
        told = in_words(where, f"sending the other stages {what}", what)
        self._notes = AsyncNotes(where.pipeline, NoteKind.NORM, told, timeout)
        self._mine: list[tuple[int, float]] = []

    def expect(self) -> None:
        """Make room for the numbers of the step that begins."""
        self._notes.expect()

    def send(self, local: Mapping[int, float]) -> None:
        """Send the numbers of the stages here, and wait for nobody."""
        self._mine = [(stage, float(value)) for stage, value in local.items()]
        self._notes.send(self._mine)

    def receive(self) -> list[float]:
        """The numbers of all stages, in stage order. PeerError if a process is gone or silent."""
        return _by_stage(self._where, [self._mine, *self._notes.receive()])


def in_words(where: Placement, sending: str, what: str) -> Callable[[int], str]:
    """For AsyncNotes within a pipeline: what a process does that sends one, and what it is that others wait for."""

    def told(rank: int) -> str:
        here, theirs = _here(where), numbered("stage", where.stages_of(rank))
        return f"{here} {sending}" if rank == dist.get_rank() else f"{here} waiting for {what} of {theirs}"

    return told


# 5. Groups of processes


def connected(where: Placement, timeout: timedelta, across: timedelta | None = None) -> Placement:
    """The same placement with its groups; collective over the default group.

    Stages of a pipeline wait `timeout` for each other, and replicas `across`, or as long if it is None.
    """
    if where.num_replicas == 1:
        return where
    size, rank = where.num_processes, dist.get_rank()
    first = where.replica * size
    with reaching(f"process {rank} was waiting for the others of its pipeline and of its stages"):
        pipeline = _new_group(range(first, first + size), timeout)
        counterparts = [rank - first + other * size for other in range(where.num_replicas)]
        replicas = _new_group(counterparts, timeout if across is None else across)
    return replace(where, pipeline=pipeline, across=replicas)


def another_across(where: Placement, timeout: timedelta) -> dist.ProcessGroup | None:
    """Another group of the same processes as `where.across`, whose tags are its own; collective over them."""
    if where.across is None:
        return None
    with reaching(f"{_here(where)} waiting for the other replicas"):
        return _new_group(dist.get_process_group_ranks(where.across), timeout)


def _new_group(ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup:
    created = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True, **arguments_beside())
    assert isinstance(created, dist.ProcessGroup), "this process is a member"
    return created
