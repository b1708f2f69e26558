"""The speed of each codec over the links between hosts, beside plain torch: the rows of docs/measured/bench-links.md.

    torchrun --nnodes 2 --node-rank 0 --master-addr HOST docs/measured/links.py quickstart --pipeline.num_stages 2

Each process of the recipe is one process here, as torchrun starts it. In each, all contenders take turns on the same
samples: Thinwire with each pair of codecs, and plain torch.
"""

from __future__ import annotations

import math
import os
import shlex
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
from contenders import BASELINES, UNCOMPRESSED, Contender, PlainTorch, Thinwire
from documents import read_document
from torch import Tensor

from thinwire.compress.stores.durable import write_for_user
from thinwire.errors.files import SIGNATURE
from thinwire.launch import cli
from thinwire.launch.plan.places import real_placement
from thinwire.launch.plan.prepare import prepare
from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.processes.rendezvous import join
from thinwire.launch.recipe import recipe
from thinwire.launch.recipe.recipe import Recipe
from thinwire.launch.shared import scratch
from thinwire.launch.shared.arguments import Parser, at_least_one, written
from thinwire.launch.shared.environment import environment
from thinwire.launch.shared.exit_codes import OK, working
from thinwire.launch.shared.rank import own_local_rank, own_rank
from thinwire.launch.shared.strict_json import dumps
from thinwire.launch.shared.tables import Table, Value, document, show
from thinwire.launch.timing.workload import NO_COMPRESSION, codec_pair, frame_bytes, label
from thinwire.pipeline.devices.device import CPU, choose, seconds_now
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.measuring.meters import WAITS, Section
from thinwire.pipeline.options import CompressionOptions
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.processes.backends import TRANSPORTS, names_of

PROG = "links.py"

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


def main(argv: Sequence[str]) -> int:
    """Take the turns of one process, print a table in process 0, and return the exit status."""
    options, rest = make_parser().parse_known_args(argv)
    wanted = recipe.parse(rest, prog=PROG)
    _check(wanted)
    contenders = contenders_of(wanted, options.codec)
    before = _rows_of(options.out)
    rank = own_place(wanted)
    with working():
        prepared = prepare(wanted, stages=real_placement(wanted, rank).stages_of(rank))
        told = take_turns(prepared, rank, contenders, options.repetitions, options.steps)
    if told is None:
        return OK
    found = table(prepared, told, options.links)
    show([found])
    if options.out:
        whole = Table(found.title, found.columns, [*before, *found.rows], found.note)
        where = environment(shlex.join([*PROG.split(), *argv]))
        said = {"generator": SIGNATURE, **document(f"bench of {wanted.name}", [whole], **where)}
        with written("--out", options.out):
            write_for_user(options.out, f"{dumps(said, indent=2)}\n".encode())
    return OK


def own_place(wanted: Recipe) -> int:
    """The rank of this process, as torchrun gives it. OptionsError if not all processes are there."""
    rank, count = own_rank(), int(os.environ.get("WORLD_SIZE", 1))
    needed = wanted.num_processes
    if rank is None or count != needed:
        raise OptionsError(
            f"a bench must have a process for each of the recipe's {needed}, got {count}; start it with torchrun, as "
            f"in torchrun --nproc-per-node {needed} docs/measured/{PROG} ..."
        )
    return rank


def contenders_of(wanted: Recipe, given: Sequence[str] | None) -> Mapping[str, CompressionOptions | None]:
    """The contenders by name: pairs of codecs, and plain torch (None).

    By default they are no compression, the recipe's codecs, some examples, and plain torch.
    """
    compression = wanted.compression
    own = f"{compression.activations}/{compression.gradients}"
    names = dict.fromkeys(given or (UNCOMPRESSED, own, *wanted.compared_codecs, *BASELINES))
    ours = {label(pair): pair for pair in (codec_pair(name) for name in names if name not in BASELINES)}
    return {**ours, **dict.fromkeys(name for name in names if name in BASELINES)}


def _rows_of(path: Path | None) -> Sequence[Any]:
    """The rows of a bench that --out names already; none of a new file. OptionsError if it holds something else."""
    if path is None or not path.exists():
        return []
    with written("--out", path):
        text = path.read_text(errors="replace")
    try:
        [found] = read_document(text)[1]
    except (ValueError, KeyError, TypeError) as error:
        raise OptionsError(f"--out must name a new file, or one of this bench; {path} is another: {error}") from error
    if tuple(found.columns) != COLUMNS:
        raise OptionsError(f"--out must name a new file, or one of this bench; {path} has other columns")
    return found.rows


def _check(wanted: Recipe) -> None:
    """Raise OptionsError that names every option that does not fit a bench."""
    OptionsError.require(
        (
            wanted.replicas.count == 1,
            f"a bench is of one pipeline; add --replicas.count 1, got {wanted.replicas.count}",
        ),
        (wanted.pipeline.accumulation == 1, "a bench measures one pass in each step; set pipeline.accumulation to 1"),
        (wanted.num_processes > 1, "a bench needs links: pipeline.num_stages must give at least 2 processes, got 1"),
        (
            not TRANSPORTS[wanted.wire.transport].over_gpus or choose(wanted.training.device) == CPU,
            f"a bench measures frames that cross its links; set wire.transport to "
            f"{names_of(lambda transport: not transport.over_gpus)}, got "
            f"{wanted.wire.transport}",
        ),
        (
            not wanted.training.compile,
            "a bench compares with plain torch, whose layers are not compiled; set training.compile to false",
        ),
    )


def make_parser() -> Parser:
    """The options of the command itself."""
    parser = Parser(
        prog=PROG,
        usage=f"torchrun ... {PROG} RECIPE [options] [options of the recipe]",
        description="Measure the speed of a recipe over the links between its processes. Every codec, no compression, "
        "and plain torch.distributed.pipelining take turns.",
    )
    add = parser.add_argument
    add(
        "--codec",
        nargs="+",
        action="extend",
        help="codecs as activations/gradients, none, 'torch fp32' or 'torch bf16' (default: none, the recipe's, "
        "some examples, and both of torch)",
    )
    add("--repetitions", type=at_least_one, default=5, help="turns of each contender (default: %(default)s)")
    add("--steps", type=at_least_one, default=2, help="measured steps in each turn (default: %(default)s)")
    add("--links", default="unshaped", help="name of these links in the table, such as 100mbit (default: %(default)s)")
    add("--out", type=Path, metavar="FILE", help="JSON file to which the rows are added")
    return parser


if __name__ == "__main__":
    sys.exit(cli.run(main, sys.argv[1:]))
