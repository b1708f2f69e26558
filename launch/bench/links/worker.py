"""One process of `thinwire bench RECIPE`: all contenders take turns, at one bandwidth after another.

Between two bandwidths, the bench shapes the links. The bench and its processes wait for each other: each sets a key in
a shared store when it is done.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.launch.bench.links.contenders import BASELINES, Codecs, Contender, PlainTorch, StepMeasures, Thinwire
from thinwire.launch.plan.places import real_placement
from thinwire.launch.plan.prepare import prepare
from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.run import recipe
from thinwire.launch.run.recipe import Recipe
from thinwire.launch.run.worker import join
from thinwire.launch.shared.rank import own_local_rank
from thinwire.pipeline.devices.device import choose, seconds_now
from thinwire.pipeline.measuring.probe import probe, probe_both
from thinwire.pipeline.processes import collectives

TURNS = "turns"
"""The key under which the processes count the turns that they have taken."""


@dataclass(frozen=True)
class BenchPlan:
    """The work of all bench processes."""

    arguments: list[str]
    """The recipe and its options."""
    contenders: dict[str, Codecs | None]
    """The codecs of each contender by name; None for plain torch."""
    shaped: list[str]
    """The contenders that take turns on shaped links too."""
    contests: int
    """Number of contests: one with unshaped links, and one for each bandwidth."""
    repetitions: int
    """Number of turns of each contender at each bandwidth."""
    steps: int
    """Measured steps of a turn, after its first step."""
    store: str
    """The file of the store that the bench and its processes share."""
    folder: str
    """The folder for the measurements and the stores of each process."""

    def write(self, path: Path) -> None:
        """Save the plan."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> BenchPlan:
        """Read a saved plan."""
        values = json.loads(path.read_text())
        contenders = {name: Codecs(**codecs) if codecs else None for name, codecs in values.pop("contenders").items()}
        return cls(**values, contenders=contenders)


def main(argv: Sequence[str]) -> int:
    """Measure all contests of a plan, and return the exit status."""
    plan, rank = BenchPlan.read(Path(argv[0])), int(os.environ["RANK"])
    prepared = prepare(recipe.parse(plan.arguments, prog="thinwire bench"), rank=rank)
    join(prepared, rank)
    where = collectives.connected(
        real_placement(prepared.recipe, rank), timedelta(seconds=prepared.recipe.wire.timeout)
    )
    store = dist.FileStore(plan.store, -1)
    store.set_timeout(timedelta(days=1))
    device = choose(prepared.recipe.training.device, own_local_rank())
    contenders: dict[str, Contender] = {
        name: Thinwire(prepared, where, rank, codecs, Path(plan.folder, f"stores-{index}"))
        if codecs
        else PlainTorch(prepared, where, rank, BASELINES[name], device)
        for index, (name, codecs) in enumerate(plan.contenders.items())
    }
    batches = _batches(prepared)

    def taken() -> None:
        if rank == 0:
            store.add(TURNS, 1)

    for index in range(plan.contests):
        store.wait([shaped(index)])
        chosen = {name: contenders[name] for name in (plan.shaped if index else contenders)}
        found = {
            "links": _probe_links(linked(prepared.recipe)),
            "turns": _take_turns(chosen, plan, batches, device, taken),
        }
        Path(plan.folder, f"contest-{index}-{rank}.json").write_text(json.dumps(found))
        dist.barrier()
        store.set(measured(index, rank), "")
    for contender in contenders.values():
        contender.close()
    dist.destroy_process_group()
    return 0


def shaped(index: int) -> str:
    """The key that the bench sets once the links have a contest's bandwidth."""
    return f"shaped {index}"


def measured(index: int, rank: int) -> str:
    """The key that a process sets once its measurements of a contest are on disk."""
    return f"measured {index} {rank}"


def _batches(prepared: Prepared) -> Iterator[tuple[Tensor, bool]]:
    """The ids of each batch of new samples, and whether none of them has come before; the same in every process."""
    size, known = prepared.recipe.batch_size, len(prepared.data.training)
    return (((torch.arange(size) + taken) % known, taken + size <= known) for taken in count(0, size))


def _take_turns(
    contenders: dict[str, Contender],
    plan: BenchPlan,
    batches: Iterator[tuple[Tensor, bool]],
    device: torch.device,
    taken: Callable[[], None],
) -> list[dict[str, Any]]:
    """Take the turns of every contender: a first step, or round, on new samples, then others on the same samples."""
    turns = []
    for _ in range(plan.repetitions):
        ids, new = next(batches)
        for name, contender in contenders.items():
            first = _timed(contender, ids, device)
            contender.measure_compute(ids)
            later = [_timed(contender, ids, device) for _ in range(plan.steps)]
            turns.append({"contender": name, "new": new, "first": first, "later": later})
            taken()
    return turns


def _timed(contender: Contender, ids: Tensor, device: torch.device) -> dict[str, Any]:
    """Time one step, from the start of all processes to the end of all, or the mean of a round.

    Stores are read from disk, not from a cache.
    """
    contender.forget_cache()
    taken: list[StepMeasures] = []
    seconds = _between_barriers(lambda: taken.append(contender.step(ids)), device)
    return {"seconds": seconds / contender.round, **asdict(taken[0])}


def _between_barriers(act: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    started = seconds_now(device)
    act()
    seconds_now(device)  # a GPU has done what it was asked
    dist.barrier()
    return time.perf_counter() - started


def linked(wanted: Recipe) -> list[tuple[int, int]]:
    """The processes with a link: neighbours in each pipeline, and those with the same stages in two replicas."""
    size = wanted.pipeline.num_processes
    neighbours = [(low, low + 1) for low in range(wanted.num_processes - 1) if (low + 1) % size]
    return [*neighbours, *sorted(real_placement(wanted).counterparts)]


def _probe_links(pairs: Sequence[tuple[int, int]]) -> list[dict[str, float]]:
    """Measure every link in both directions, one link after another. Collective."""
    found = []
    for low, high in pairs:
        ends = [(low, high), (high, low)]
        speeds, both = [probe(*end) for end in ends], probe_both(low, high)
        for (source, target), speed in zip(ends, speeds, strict=True):
            speed = replace(speed, duplex=min(1.0, both / speed.goodput))
            found.append({"source": source, "target": target, **asdict(speed)})
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
