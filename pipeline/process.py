"""This process among the others: which stages it holds, and numbers gathered from all stages in stage order.

The one place for rank arithmetic. A sum over stages is gathered and added in stage order in float64, never
all-reduced, so that it does not depend on where the stages live.

With replicas, every pipeline has processes of its own, one pipeline after the other: rank = replica * processes of a
pipeline + process. So neighbours of a pipeline have neighbouring ranks. What is gathered is gathered over one of two
axes: the processes of a pipeline, or the processes that hold the same stages in every replica.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from thinwire.pipeline.backends import arguments_beside
from thinwire.pipeline.errors import MismatchError
from thinwire.pipeline.exchange import all_gather_json, gather_json
from thinwire.pipeline.transport import ProcessGroupReceiver, ProcessGroupSender, reaching

AXES = ("replica", "stage")
"""Of the mesh of all processes. Along the second one are the processes of a pipeline."""


_TAG_OF_NUMBERS = 2  # other messages of the same group have 0 and 1
_BYTES_OF_A_NUMBER = 8


@dataclass(frozen=True)
class Placement:
    """Where each stage of this process's pipeline lives: `process_of[stage]` is a rank of the default group."""

    process_of: Mapping[int, int]
    replica: int = 0
    """Which of the pipelines this one is."""
    num_replicas: int = 1
    """Pipelines with processes of their own; a simulation has one, which does the work of all replicas."""
    mesh: DeviceMesh | None = field(default=None, compare=False)
    """All processes, (replica, stage): one row for each pipeline; None without replicas."""

    @property
    def pipeline(self) -> dist.ProcessGroup | None:
        """The processes of this pipeline; None is the default group."""
        return None if self.mesh is None else self.mesh.get_group("stage")

    @property
    def across(self) -> dist.ProcessGroup | None:
        """The processes with the same stages, one of each replica, in their order; None without replicas."""
        return None if self.mesh is None else self.mesh.get_group("replica")

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.process_of)

    @property
    def num_processes(self) -> int:
        """Processes of one pipeline."""
        return len(set(self.process_of.values()))

    @property
    def num_parts(self) -> int:
        """Parts of a checkpoint: one for each stage of each replica."""
        return self.num_replicas * self.num_stages

    def part(self, stage: int) -> int:
        """The part of a checkpoint that holds a stage of this pipeline."""
        return self.replica * self.num_stages + stage

    @property
    def last_process(self) -> int:
        """The rank that holds the last stage, and so the loss."""
        return self.process_of[self.num_stages - 1]

    @property
    def reporter(self) -> int:
        """The rank that logs and prints for all: it holds the last stage of the first replica."""
        return self.last_process - self.replica * self.num_processes

    @property
    def neighbours(self) -> list[tuple[int, int]]:
        """The pairs of processes that share a boundary: (0, 1), (2, 3) before (1, 2): several can work at once."""
        processes = [self.process_of[stage] for stage in range(self.num_stages)]
        pairs = {(min(pair), max(pair)) for pair in pairwise(processes) if pair[0] != pair[1]}
        return sorted(pairs, key=lambda pair: (pair[0] % 2, pair))

    @property
    def counterparts(self) -> list[tuple[int, int]]:
        """The pairs of processes that hold the same stages in two replicas, in an order in which several can work."""
        if self.num_replicas == 1:
            return []
        size, count = self.num_processes, self.num_replicas
        pairs = [(low, high) for high in range(count) for low in range(high)]
        pairs.sort(key=lambda pair: (sum(pair) % count, pair))
        return [(low * size + place, high * size + place) for low, high in pairs for place in range(size)]

    def counterpart(self, process: int, replica: int) -> int:
        """The process that holds in a replica the stages that `process` holds in its own."""
        return process % self.num_processes + replica * self.num_processes

    def watched(self, process: int) -> list[tuple[int, int]]:
        """The pairs with a process that hear each other: neighbours, and the same stages in neighbouring replicas."""
        size = self.num_processes
        replicas = [(process - size, process), (process, process + size)]
        last = self.num_replicas * size
        return [pair for pair in self.neighbours if process in pair] + [
            (low, high) for low, high in replicas if low >= 0 and high < last and self.num_replicas > 1
        ]

    def stages_of(self, process: int) -> list[int]:
        """The stages a process of any replica holds, in stage order."""
        here = process
        if self.num_replicas > 1:
            here = process % self.num_processes + self.replica * self.num_processes
        return sorted(stage for stage, holder in self.process_of.items() if holder == here)

    def replica_of(self, process: int) -> int | None:
        """The replica of a process; None without replicas."""
        return process // self.num_processes if self.num_replicas > 1 else None

    def connected(self, timeout: timedelta, across: timedelta | None = None) -> Placement:
        """The same placement with its mesh; collective over the default group.

        Stages of a pipeline wait `timeout` for each other, and replicas `across`, or as long if it is None. The groups
        of both axes are made here, because a mesh gives those that it makes one time-out.
        """
        if self.num_replicas == 1:
            return self
        size, rank = self.num_processes, dist.get_rank()
        first = self.replica * size
        with reaching(f"process {rank} was waiting for the others of its pipeline and of its stages"):
            pipeline = _group(range(first, first + size), timeout)
            counterparts = [rank - first + other * size for other in range(self.num_replicas)]
            replicas = _group(counterparts, timeout if across is None else across)
        ranks = torch.arange(self.num_replicas * size).view(self.num_replicas, size)
        return replace(self, mesh=DeviceMesh.from_group([replicas, pipeline], "cpu", ranks, mesh_dim_names=AXES))

    def another_across(self, timeout: timedelta) -> dist.ProcessGroup | None:
        """Another group of the same processes as `across`, whose tags are its own; collective over them."""
        if self.across is None:
            return None
        with reaching(f"{self._me} waiting for the other replicas"):
            return _group(dist.get_process_group_ranks(self.across), timeout)

    def gather_numbers(self, local: Mapping[int, float]) -> list[float]:
        """Gather one float64 of every stage of this pipeline, in stage order, in all its processes."""
        mine = torch.zeros(self.num_stages, dtype=torch.float64)
        for stage, value in local.items():
            mine[stage] = value
        everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size(self.pipeline))]
        with reaching(f"{were(local)} waiting for numbers of all stages"):
            dist.all_gather(everyone, mine, self.pipeline)
        return [float(everyone[self.place_of(stage)][stage]) for stage in range(self.num_stages)]

    def gather_across(self, mine: Sequence[float]) -> list[float]:
        """The numbers of this process's counterparts in all replicas, in their order, in each of them.

        Every replica gives equally many. Without replicas, the numbers themselves.
        """
        if self.num_replicas == 1:
            return list(mine)
        given = torch.tensor(mine, dtype=torch.float64)
        everyone = [torch.empty_like(given) for _ in range(self.num_replicas)]
        with reaching(f"{self._me} waiting for numbers of the other replicas"):
            dist.all_gather(everyone, given, self.across)
        return [float(number) for numbers in everyone for number in numbers]

    def everyone_across(self, mine: Any) -> list[Any]:
        """One JSON value of this process's counterparts in all replicas, in their order, in each of them."""
        if self.num_replicas == 1:
            return [mine]
        return all_gather_json(mine, f"{self._me} waiting for a message of the other replicas", self.across)

    def meet(self, what: str) -> None:
        """Wait until all processes are here. A PeerError says `what` if one is gone or silent."""
        with reaching(f"{self._me} {what}"):
            dist.barrier()

    def anyone(self, mine: bool) -> bool:
        """Whether any process says yes; in all processes."""
        if dist.get_world_size() == 1:  # as in a simulation, which would wait for gloo's threads
            return mine
        everyone = [torch.zeros(1, dtype=torch.float32) for _ in range(dist.get_world_size())]
        with reaching(f"{self._me} waiting for a word of all processes"):
            dist.all_gather(everyone, torch.tensor([float(mine)], dtype=torch.float32))
        return any(map(bool, everyone))

    def compare(self, local: Mapping[int, Mapping[str, str]]) -> None:
        """Compare values with the same name on several stages; collective. MismatchError names the first difference."""
        everyone: dict[str, tuple[int, str]] = {}
        for stage, found in enumerate(self.gather(local) or ()):
            for name, value in found.items():
                other, expected = everyone.setdefault(name, (stage, value))
                if value != expected:
                    raise MismatchError(
                        f"the buffers of {name} differ between stages {other} and {stage}, but both ends must hold "
                        f"equal ones; use the same release, torch and kind of machine at both"
                    )

    def compare_replicas(self, local: Mapping[int, str]) -> None:
        """Compare the digest of each stage's weights with those in the other replicas; collective.

        Raises MismatchError, in every process with that stage, if one differs.
        """
        told = self.everyone_across([local[stage] for stage in sorted(local)])
        for place, stage in enumerate(sorted(local)):
            different = [replica for replica, digests in enumerate(told) if digests[place] != told[0][place]]
            if different:
                raise MismatchError(
                    f"the weights or buffers of stage {stage} differ between replicas 0 and {different[0]}, but all "
                    f"replicas must hold equal ones; use the same release, torch and kind of machine for all, and no "
                    f"buffers that change in training, but for running statistics of norms"
                )

    def gather(self, local: Mapping[int, Any]) -> list[Any] | None:
        """Gather one JSON value of every stage of this pipeline, in stage order, in the process of the last stage.

        None in the other processes.
        """
        what = f"{were(local)} reporting to the last stage"
        everyone = gather_json(list(local.items()), self.last_process, what, self.pipeline)
        if everyone is None:
            return None
        found = [dict(pairs) for pairs in everyone]
        return [found[self.place_of(stage)][stage] for stage in range(self.num_stages)]

    def everyone(self, mine: Any) -> list[Any]:
        """Gather one JSON value of every process, in rank order, in all processes."""
        return all_gather_json(mine, f"{self._me} waiting for a message of all processes")

    def place_of(self, stage: int) -> int:
        """The place of a stage's process among those of its pipeline."""
        return self.process_of[stage] - self.replica * self.num_processes

    @property
    def _me(self) -> str:
        return were(self.stages_of(dist.get_rank()))


class StageNumbers:
    """One float64 of every stage, in all processes of a pipeline, once in a step.

    A collective call makes room for what arrives only when it is called: over a slow link, all wait for two latencies
    after the last process has come. Here room is made when the step begins. So the process that comes last waits for
    nobody, and the others for one latency.

    Args:
        where: the processes of the stages.
        what: the number in words, with an article; a PeerError names it.
        timeout: of a wait.
    """

    def __init__(self, where: Placement, what: str, timeout: timedelta) -> None:
        self._where, self._what = where, what
        group = where.pipeline or dist.group.WORLD
        assert group is not None, "torch.distributed is initialized"
        ranks, mine = dist.get_process_group_ranks(group), dist.get_rank()
        of_all: dict[str, Any] = {"group": group, "tag": _TAG_OF_NUMBERS, "timeout": timeout}
        others = {rank: place for place, rank in enumerate(ranks) if rank != mine}
        size = _BYTES_OF_A_NUMBER * where.num_stages
        self._mine = torch.zeros(where.num_stages, dtype=torch.float64)
        self._senders = {rank: ProcessGroupSender(size, peer=place, **of_all) for rank, place in others.items()}
        self._receivers = {rank: ProcessGroupReceiver(size, peer=place, **of_all) for rank, place in others.items()}

    def expect(self) -> None:
        """Make room for the numbers of the step that begins."""
        for rank, receiver in self._receivers.items():
            receiver.post(1, self._waiting_for(rank))

    def tell(self, local: Mapping[int, float]) -> None:
        """Send the numbers of the stages here, and wait for nobody."""
        self._mine = torch.zeros(self._where.num_stages, dtype=torch.float64)
        for stage, value in local.items():
            self._mine[stage] = value
        for rank, sender in self._senders.items():
            sender.flush()
            buffer = sender.take()
            buffer.copy_(self._mine.view(torch.uint8))
            sender.send(buffer, len(buffer), self._telling(rank))

    def hear(self) -> list[float]:
        """The numbers of all stages, in stage order. PeerError if a process is gone or silent."""
        found = self._mine.clone()
        for rank, receiver in self._receivers.items():
            buffer = receiver.receive(self._waiting_for(rank))
            theirs = self._where.stages_of(rank)
            found[theirs] = buffer.view(torch.float64)[theirs]
            receiver.give(buffer)
        return [float(number) for number in found]

    def _telling(self, rank: int) -> str:
        mine, theirs = self._where.stages_of(dist.get_rank()), self._where.stages_of(rank)
        return f"{were(mine)} telling {in_words(theirs)} {self._what}"

    def _waiting_for(self, rank: int) -> str:
        mine, theirs = self._where.stages_of(dist.get_rank()), self._where.stages_of(rank)
        return f"{were(mine)} waiting for {self._what} of {in_words(theirs)}"


def _group(ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup:
    created = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True, **arguments_beside())
    assert isinstance(created, dist.ProcessGroup), "this process is a member"
    return created


def in_words(stages: Collection[int]) -> str:
    """Stages in words: `stage 1`, `stages 1, 2`."""
    return f"stage{'s' * (len(stages) != 1)} {', '.join(map(str, sorted(stages)))}"


def were(stages: Collection[int]) -> str:
    """The subject of a sentence on what stages did: `stage 1 was`, `stages 1, 2 were`."""
    return f"{in_words(stages)} {'was' if len(stages) == 1 else 'were'}"
