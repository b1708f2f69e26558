"""This process among the others: which stages it holds, and numbers gathered from all stages in stage order.

The one place for rank arithmetic. A sum over stages is gathered and added in stage order in float64, never
all-reduced, so that it does not depend on where the stages live.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from thinwire.pipeline.errors import MismatchError
from thinwire.pipeline.exchange import all_gather_json, gather_json
from thinwire.pipeline.transport import reaching


@dataclass(frozen=True)
class Placement:
    """Where each stage lives: `process_of[stage]` is a rank of the default group."""

    process_of: Mapping[int, int]

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.process_of)

    @property
    def last_process(self) -> int:
        """The rank that holds the last stage, and so the loss."""
        return self.process_of[self.num_stages - 1]

    @property
    def neighbours(self) -> list[tuple[int, int]]:
        """The pairs of processes that share a boundary: (0, 1), (2, 3) before (1, 2): several can work at once."""
        processes = [self.process_of[stage] for stage in range(self.num_stages)]
        pairs = {(min(pair), max(pair)) for pair in pairwise(processes) if pair[0] != pair[1]}
        return sorted(pairs, key=lambda pair: (pair[0] % 2, pair))

    def stages_of(self, process: int) -> list[int]:
        """The stages a process holds, in stage order."""
        return sorted(stage for stage, holder in self.process_of.items() if holder == process)

    def gather_numbers(self, local: Mapping[int, float]) -> list[float]:
        """Gather one float64 of every stage, in stage order, in all processes."""
        mine = torch.zeros(self.num_stages, dtype=torch.float64)
        for stage, value in local.items():
            mine[stage] = value
        everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        with reaching(f"{_named(local)} waiting for numbers of all stages"):
            dist.all_gather(everyone, mine)
        return [float(everyone[self.process_of[stage]][stage]) for stage in range(self.num_stages)]

    def meet(self, what: str) -> None:
        """Wait until all processes are here. A PeerError says `what` if one is gone or silent."""
        with reaching(f"{_named(dict.fromkeys(self.stages_of(dist.get_rank())))} {what}"):
            dist.barrier()

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

    def gather(self, local: Mapping[int, Any]) -> list[Any] | None:
        """Gather one JSON value of every stage, in stage order; None except in the process of the last stage."""
        what = f"{_named(local)} reporting to the last stage"
        everyone = gather_json(list(local.items()), self.last_process, what)
        if everyone is None:
            return None
        found = [dict(pairs) for pairs in everyone]
        return [found[self.process_of[stage]][stage] for stage in range(self.num_stages)]

    def everyone(self, mine: Any) -> list[Any]:
        """Gather one JSON value of every process, in rank order, in all processes."""
        here = _named(dict.fromkeys(self.stages_of(dist.get_rank())))
        return all_gather_json(mine, f"{here} waiting for a message of all processes")


def _named(stages: Mapping[int, Any]) -> str:
    listed = ", ".join(map(str, sorted(stages)))
    return f"stage {listed} was" if len(stages) == 1 else f"stages {listed} were"
