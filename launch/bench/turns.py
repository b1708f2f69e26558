"""The turns of a bench: all contenders of a process train, one after another, and a row says what each took."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.launch.bench.contenders import BASELINES, UNCOMPRESSED, Contender, PlainTorch, Thinwire
from thinwire.launch.plan.places import real_placement
from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.processes.rendezvous import join
from thinwire.launch.shared import scratch
from thinwire.launch.shared.rank import own_local_rank
from thinwire.launch.shared.tables import Table, Value
from thinwire.launch.timing.workload import NO_COMPRESSION, frame_bytes
from thinwire.pipeline.devices.device import choose, seconds_now
from thinwire.pipeline.measuring.meters import WAITS, Section
from thinwire.pipeline.options import CompressionOptions
from thinwire.pipeline.processes import collectives

Turn = Mapping[str, Any]
"""What a contender took in its turn in one process: `contender`, `new` (whether no sample had come before), and the
steps as JSON values: the `first` on new samples, and the `later` ones on the same."""

PARTS: Mapping[str, Sequence[Section]] = {"compute": ("compute",), "codecs": ("encode", "decode"), "waits": WAITS}
"""The parts of a step, with the sections of a meter that they hold."""
COLUMNS = (
    *("links", "who", "samples/s", "first visits, samples/s", "x none", "MB a step", "activation, kB", "forward, ms"),
    *(f"{part}, ms" for part in PARTS),
    "other, ms",
)
NOTE = (
    "Medians. First visits: with samples that have not come before, which AQ-SGD sends in full or by a codec of their "
    "own. x none: speed over Thinwire's uncompressed speed. MB: of all processes, for samples seen before. forward: of "
    "a micro-batch, the mean of a step, in the slowest stage; links of 8 x kB / ms Mbit/s carry its uncompressed "
    "activation in that time. The other ms are the parts of a step, means over the processes."
)


def take_turns(
    prepared: Prepared, rank: int, contenders: Mapping[str, CompressionOptions | None], repetitions: int, steps: int
) -> list[list[Turn]] | None:
    """Take all turns as one process of the bench; those of every process, in process 0 alone.

    A contender without codecs is plain torch. A turn is a first step on new samples, and `steps` others on the same
    samples.
    """
    torch.set_num_threads(prepared.recipe.training.threads)
    join(prepared, rank)
    timeout = timedelta(seconds=prepared.recipe.wire.timeout)
    where = collectives.connected(real_placement(prepared.recipe, rank), timeout)
    device, taken = choose(prepared.recipe.training.device, own_local_rank()), list[Turn]()
    with scratch.folder() as folder:
        made: dict[str, Contender] = {
            name: Thinwire(prepared, where, rank, codecs, Path(folder, f"stores-{index}"))
            if codecs
            else PlainTorch(prepared, where, rank, BASELINES[name], device)
            for index, (name, codecs) in enumerate(contenders.items())
        }
        batches = batches_of(prepared)
        for repetition in range(repetitions):
            ids, new = next(batches)
            for name, contender in made.items():
                if rank == 0:
                    print(f"turn {repetition + 1} of {repetitions}: {name}", file=sys.stderr, flush=True)
                first, *later = [timed(contender, ids, device) for _ in range(1 + steps)]
                taken.append({"contender": name, "new": new, "first": first, "later": later})
        told = collectives.gather_json(taken, 0, "the end of the bench")
        for contender in made.values():
            contender.close()
    dist.destroy_process_group()
    return told


def batches_of(prepared: Prepared) -> Iterator[tuple[Tensor, bool]]:
    """The ids of each batch of new samples, and whether none of them has come before; the same in every process."""
    size, known = prepared.recipe.batch_size, len(prepared.data.training)
    return (((torch.arange(size) + taken) % known, taken + size <= known) for taken in count(0, size))


def timed(contender: Contender, ids: Tensor, device: torch.device) -> dict[str, Any]:
    """Time one step, from the start of all processes to the end of all; JSON values.

    Stores are read from disk, not from a cache.
    """
    contender.forget_cache()
    dist.barrier()
    started = seconds_now(device)
    measured = contender.step(ids)
    seconds_now(device)  # a GPU has done what it was asked
    dist.barrier()
    return {"seconds": time.perf_counter() - started, **asdict(measured)}


def table(prepared: Prepared, told: Sequence[Sequence[Turn]], links: str) -> Table:
    """A contender a row; `told` are the turns of each process, `links` what the links are called."""
    recipe = prepared.recipe
    sizes = [
        frame_bytes(crossing, NO_COMPRESSION, boundary, "activations")
        for boundary, crossing in enumerate(prepared.outputs[:-1])
    ]
    names = list(dict.fromkeys(turn["contender"] for turn in told[0]))
    later = {name: [[step for turn in _of(turns, name) for step in turn["later"]] for turns in told] for name in names}
    first = {name: [[turn["first"] for turn in _of(turns, name) if turn["new"]] for turns in told] for name in names}
    rows = [
        [
            *(links, name, recipe.batch_size / seconds, _ratio(recipe.batch_size, slowest(first[name]))),
            _ratio(slowest(later[UNCOMPRESSED]), seconds) if UNCOMPRESSED in later else None,
            *(_sent(later[name]), max(sizes) / 1e3 if sizes else None, *_parts(later[name], seconds)),
        ]
        for name in names
        for seconds in [slowest(later[name])]
    ]
    return Table(f"{recipe.name}: {recipe.pipeline.schedule}, {recipe.batch_size} samples a step", COLUMNS, rows, NOTE)


def slowest(by_process: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    """Median seconds of a step in its slowest process; NaN without steps, as where no batch was new."""
    seconds = [max(step["seconds"] for step in of_all) for of_all in zip(*by_process, strict=True)]
    return statistics.median(seconds) if seconds else math.nan


def _of(turns: Sequence[Turn], name: str) -> list[Turn]:
    return [turn for turn in turns if turn["contender"] == name]


def _ratio(of: float, over: float) -> float | None:
    return None if math.isnan(over) else of / over


def _sent(by_process: Sequence[Sequence[Mapping[str, Any]]]) -> float | None:
    """Megabytes of a step over all links; None of plain torch, which counts none."""
    return sum(steps[-1]["sent"] for steps in by_process) / 1e6 or None


def _parts(by_process: Sequence[Sequence[Mapping[str, Any]]], seconds: float) -> list[Value]:
    """Milliseconds of the slowest forward, and of the parts of a step of so many seconds; nothing of plain torch."""
    if not by_process[0][0]["sections"]:
        return [None] * (2 + len(PARTS))
    forward = max(statistics.median(step["forward"] for step in steps) for steps in by_process)
    parts = [
        statistics.mean(
            statistics.median(sum(step["sections"][name] for name in sections) for step in steps)
            for steps in by_process
        )
        for sections in PARTS.values()
    ]
    return [1e3 * part for part in (forward, *parts, seconds - sum(parts))]
