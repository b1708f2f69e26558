"""This process among the others: which stages it holds, and who its neighbours are. The one place for rank arithmetic.

With replicas, every pipeline has processes of its own, one pipeline after the other: rank = replica * processes of a
pipeline + process. So neighbours of a pipeline have neighbouring ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch.distributed as dist


@dataclass(frozen=True)
class Placement:
    """Where each stage of this process's pipeline lives: `process_of[stage]` is a rank of the default group."""

    process_of: Mapping[int, int]
    replica: int = 0
    """Which of the pipelines this one is."""
    num_replicas: int = 1
    """Pipelines with processes of their own; a simulation has one, which does the work of all replicas."""
    pipeline: dist.ProcessGroup | None = field(default=None, compare=False)
    """The processes of this pipeline; None is the default group."""
    across: dist.ProcessGroup | None = field(default=None, compare=False)
    """The processes with the same stages, one of each replica, in their order; None without replicas."""

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
        size, count = self.num_processes, self.num_replicas
        pairs = [(low, high) for high in range(count) for low in range(high)]
        pairs.sort(key=lambda pair: (sum(pair) % count, pair))
        return [(low * size + place, high * size + place) for low, high in pairs for place in range(size)]

    def counterpart(self, process: int, replica: int) -> int:
        """The process that holds in a replica the stages that `process` holds in its own."""
        return process % self.num_processes + replica * self.num_processes

    def watched(self, process: int) -> list[tuple[int, int]]:
        """The pairs of a process that watch each other: neighbours, and the same stages in neighbouring replicas."""
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

    def place_of(self, stage: int) -> int:
        """The place of a stage's process among those of its pipeline."""
        return self.process_of[stage] - self.replica * self.num_processes
