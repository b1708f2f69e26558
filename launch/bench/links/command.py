"""`thinwire bench RECIPE`: the speed of each codec over the links between hosts, beside plain torch.

    thinwire cluster run --hosts 2 --bandwidth 100mbit -- thinwire bench quickstart --pipeline.num_stages 2

Each process of the recipe is one process of the bench: a host of `thinwire cluster run`, or a process of torchrun. In
each, all contenders take turns on the same samples.
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
    from thinwire.launch.bench.links.contenders import Codecs

PROG = "thinwire bench"
REFERENCE = "none"
PLAIN = ("torch fp32", "torch bf16")
"""The contenders that are plain torch, with this dtype on the wire."""
BETWEEN = ", replicas "
"""In the name of a contender: what comes before the codec of the gradients between replicas."""


def main(argv: Sequence[str]) -> int:
    """Take the turns of one process, print a table in process 0, and return the exit status."""
    options, rest = make_parser().parse_known_args(argv)
    wanted = recipe.parse(rest, prog=PROG)
    _check(wanted, options.codec, options.replica_codec)
    contenders = contenders_of(wanted, options.codec, options.replica_codec)
    before = _rows_of(options.out)
    rank = own_place(wanted)
    from thinwire.launch.bench.links.turns import table, take_turns
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
    """The rank of this process, as torchrun gives it, or that of its host in `thinwire cluster run`.

    The simulated hosts share the cores of this machine, and its GPUs. OptionsError if not all processes are there.
    """
    if "RANK" not in os.environ and "THINWIRE_HOST" in os.environ:
        host, hosts = os.environ["THINWIRE_HOST"], os.environ["THINWIRE_HOSTS"]
        os.environ.update(RANK=host, WORLD_SIZE=hosts, LOCAL_RANK=host)
        cores = sorted(os.sched_getaffinity(0))
        taken = core_of(int(hosts), wanted.pipeline.num_processes, len(cores))
        os.sched_setaffinity(0, {cores[taken[int(host)]]})
    rank, count = own_rank(), int(os.environ.get("WORLD_SIZE", 1))
    needed = wanted.num_processes
    if rank is None or count != needed:
        raise OptionsError(
            f"a bench must have a process for each of the recipe's {needed}, got {count}; start it with thinwire "
            f"cluster run --hosts {needed} --bandwidth 100mbit -- {PROG} ..., or with torchrun"
        )
    return rank


def core_of(processes: int, size: int, cores: int) -> list[int]:
    """Which of so many cores each process has, in pipelines of `size` processes.

    Each replica has cores of its own if there are enough: all replicas compute at the same time, and of the stages of
    one replica some always wait.
    """
    each = max(1, cores // (processes // size))
    return [(rank // size * each + rank % size % each) % cores for rank in range(processes)]


def contenders_of(
    wanted: Recipe, given: Sequence[str] | None, between: Sequence[str] | None
) -> Mapping[str, Codecs | None]:
    """The contenders by name: pairs of codecs, and plain torch (None).

    By default they are no compression, the recipe's codecs, some examples, and plain torch. With replicas, each pair is
    there with each codec between replicas, by default none and that of the recipe; plain torch has no replicas here.
    """
    from thinwire.launch.bench.links.contenders import Codecs
    from thinwire.launch.timing.workload import codec_pair, label

    names = dict.fromkeys(given or default_codecs(wanted))
    ends = {label(pair): pair for pair in (codec_pair(name) for name in names if name not in PLAIN)}
    if wanted.replicas.count == 1:
        ours = {name: Codecs(pair.activations, pair.gradients) for name, pair in ends.items()}
        return {**ours, **dict.fromkeys(name for name in names if name in PLAIN)}
    return {
        name if codec == REFERENCE else f"{name}{BETWEEN}{codec}": Codecs(pair.activations, pair.gradients, codec)
        for codec in dict.fromkeys(between or (REFERENCE, str(wanted.replicas.method)))
        for name, pair in ends.items()
    }


def default_codecs(wanted: Recipe) -> Sequence[str]:
    """The codecs of boundaries that take turns by default; without a boundary there is nothing to compress."""
    plain = PLAIN if wanted.replicas.count == 1 else ()
    if not wanted.num_boundaries:
        return (REFERENCE, *plain)
    compression = wanted.compression
    own = f"{compression.activations}/{compression.gradients}"
    return (REFERENCE, own, *wanted.compared_codecs, *plain)


def _rows_of(path: Path | None) -> Sequence[Any]:
    """The rows of a bench that --out names already; none of a new file. OptionsError if it holds something else."""
    if path is None or not path.exists():
        return []
    from thinwire.launch.bench.links.turns import COLUMNS

    with written("--out", path):
        text = path.read_text(errors="replace")
    try:
        [found] = read_document(text)[1]
    except ValueError as error:
        raise OptionsError(f"--out must name a new file, or one of this bench; {path} is another: {error}") from error
    if tuple(found.columns) != COLUMNS:
        raise OptionsError(f"--out must name a new file, or one of this bench; {path} has other columns")
    return found.rows


def _check(wanted: Recipe, codecs: Sequence[str] | None, between: Sequence[str] | None) -> None:
    """Raise OptionsError that names every option that does not fit a bench."""
    from thinwire.pipeline.devices.device import CPU, choose
    from thinwire.pipeline.processes.backends import TRANSPORTS, names_of

    _check_between(between or ())
    several = {replica: each.pipeline.accumulation for replica, each in wanted.replicas.overrides.items()}
    several = {replica: passes for replica, passes in several.items() if passes not in (None, 1)}
    plain = [name for name in codecs or () if name in PLAIN]
    OptionsError.require(
        (wanted.pipeline.accumulation == 1, "a bench measures one pass in each step; set pipeline.accumulation to 1"),
        (
            not several,
            f"a bench measures one pass in each step; remove pipeline.accumulation from replicas.overrides, got "
            f"{', '.join(f'{passes} in replica {replica}' for replica, passes in several.items())}",
        ),
        (
            wanted.num_processes > 1,
            "a bench needs links: pipeline.num_stages and replicas.count must give at least 2 processes, got 1",
        ),
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
        (
            wanted.replicas.count > 1 or not between,
            "--replica-codec needs replicas; add --replicas.count, such as 2",
        ),
        (
            wanted.replicas.count == 1 or not plain,
            f"plain torch has no replicas here; leave {', '.join(plain)} out of --codec, or set replicas.count to 1",
        ),
        (
            wanted.num_boundaries > 0 or not set(codecs or ()) - {REFERENCE},
            "--codec needs a boundary; leave it out, or set pipeline.num_stages to 2 or more, got 1",
        ),
    )


def _check_between(listed: Sequence[str]) -> None:
    """Raise OptionsError, with a sentence, if one of --replica-codec is no codec of gradients between replicas."""
    from thinwire.pipeline.options import ReplicaOptions

    for text in listed:
        try:
            ReplicaOptions(count=2, gradients=text)
        except OptionsError as error:
            told = [mistake.partition(": ")[2] for mistake in error.mistakes]
            raise OptionsError([f"--replica-codec {text}: {mistake}" for mistake in told]) from error


def make_parser() -> Parser:
    """The options of the command itself."""
    parser = Parser(
        prog=PROG,
        usage=f"thinwire cluster run --hosts 2 --bandwidth 100mbit -- {PROG} RECIPE [options] [options of the recipe]",
        description="Measure the speed of a recipe over the links between its processes. Every codec, no compression, "
        "and (of one pipeline) plain torch.distributed.pipelining take turns.",
    )
    add = parser.add_argument
    add(
        "--codec",
        nargs="+",
        action="extend",
        help="codecs as activations/gradients, none, 'torch fp32' or 'torch bf16' (default: none, the recipe's, "
        "some examples, and both of torch)",
    )
    add(
        "--replica-codec",
        nargs="+",
        action="extend",
        metavar="CODEC",
        help="codecs of the gradients between replicas, such as 'ef(q(4))' (default: none, and the recipe's)",
    )
    add("--repetitions", type=at_least_one, default=5, help="turns of each contender (default: %(default)s)")
    add(
        "--steps",
        type=at_least_one,
        default=2,
        help="measured steps in each turn, or rounds of replicas.sync.every steps (default: %(default)s)",
    )
    add("--links", default="unshaped", help="name of these links in the table, such as 100mbit (default: %(default)s)")
    add("--out", type=Path, metavar="FILE", help="JSON file to which the rows are added")
    return parser
