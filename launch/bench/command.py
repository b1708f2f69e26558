"""`thinwire bench RECIPE`: the speed of each codec over the links between hosts, beside plain torch.

    torchrun --nnodes 2 --node-rank 0 --master-addr HOST -m thinwire bench quickstart --pipeline.num_stages 2

Each process of the recipe is one process of the bench, as torchrun starts it. In each, all contenders take turns on the
same samples.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.compress.stores.durable import write_for_user
from thinwire.errors.files import SIGNATURE
from thinwire.launch.recipe import recipe
from thinwire.launch.recipe.recipe import Recipe
from thinwire.launch.shared.arguments import Parser, at_least_one, written
from thinwire.launch.shared.environment import environment
from thinwire.launch.shared.exit_codes import OK, working
from thinwire.launch.shared.rank import own_rank
from thinwire.launch.shared.strict_json import dumps
from thinwire.launch.shared.tables import Table, document, read_document, show
from thinwire.pipeline.errors import OptionsError

if TYPE_CHECKING:
    from thinwire.pipeline.options import CompressionOptions

PROG = "thinwire bench"
REFERENCE = "none"
PLAIN = ("torch fp32", "torch bf16")
"""The contenders that are plain torch, with this dtype on the wire."""


def main(argv: Sequence[str]) -> int:
    """Take the turns of one process, print a table in process 0, and return the exit status."""
    options, rest = make_parser().parse_known_args(argv)
    wanted = recipe.parse(rest, prog=PROG)
    _check(wanted)
    contenders = contenders_of(wanted, options.codec)
    before = _rows_of(options.out)
    rank = own_place(wanted)
    from thinwire.launch.bench.turns import table, take_turns
    from thinwire.launch.plan.prepare import prepare

    with working():
        prepared = prepare(wanted, rank=rank)
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
            f"in torchrun --nproc-per-node {needed} -m {PROG} ..."
        )
    return rank


def contenders_of(wanted: Recipe, given: Sequence[str] | None) -> Mapping[str, CompressionOptions | None]:
    """The contenders by name: pairs of codecs, and plain torch (None).

    By default they are no compression, the recipe's codecs, some examples, and plain torch.
    """
    from thinwire.launch.timing.workload import codec_pair, label

    compression = wanted.compression
    own = f"{compression.activations}/{compression.gradients}"
    names = dict.fromkeys(given or (REFERENCE, own, *wanted.compared_codecs, *PLAIN))
    ours = {label(pair): pair for pair in (codec_pair(name) for name in names if name not in PLAIN)}
    return {**ours, **dict.fromkeys(name for name in names if name in PLAIN)}


def _rows_of(path: Path | None) -> Sequence[Any]:
    """The rows of a bench that --out names already; none of a new file. OptionsError if it holds something else."""
    if path is None or not path.exists():
        return []
    from thinwire.launch.bench.turns import COLUMNS

    with written("--out", path):
        text = path.read_text(errors="replace")
    try:
        [found] = read_document(text)[1]
    except ValueError as error:
        raise OptionsError(f"--out must name a new file, or one of this bench; {path} is another: {error}") from error
    if tuple(found.columns) != COLUMNS:
        raise OptionsError(f"--out must name a new file, or one of this bench; {path} has other columns")
    return found.rows


def _check(wanted: Recipe) -> None:
    """Raise OptionsError that names every option that does not fit a bench."""
    from thinwire.pipeline.devices.device import CPU, choose
    from thinwire.pipeline.processes.backends import TRANSPORTS, names_of

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
        usage=f"torchrun ... -m {PROG} RECIPE [options] [options of the recipe]",
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
