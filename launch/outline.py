"""`thinwire outline RECIPE --to FILE`: write what a process must know of data that it never reads.

thinwire outline split-cifar10 --to outline.json               the client, who has the data
thinwire train split-cifar10 ... --data.outline outline.json   the server, who has not
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thinwire.compress.stores.durable import write_for_user
from thinwire.launch.recipe import recipe
from thinwire.launch.shared.arguments import Parser, written
from thinwire.launch.shared.exit_codes import OK
from thinwire.launch.shared.progress import showing

PROG = "thinwire outline"


def main(argv: Sequence[str]) -> int:
    """Write the file, and return the exit status."""
    options, rest = make_parser().parse_known_args(argv)
    wanted = recipe.parse(rest, prog=PROG)
    from thinwire.models.data.load import load
    from thinwire.models.data.outline import outline_text

    with showing("reading the data"):
        data = load(wanted.data, seed=wanted.training.seed)
    text = outline_text(data, labels=options.labels)
    with written("--to", options.to):
        write_for_user(options.to, text.encode())
    held_out = f" and {len(data.held_out)}" if data.held_out else ""
    told = "their labels, " if options.labels else "no label, "
    told += "the names of the classes, " * bool(data.classes)
    told += "the tokens in each, " * (data.training.lengths is not None)
    print(
        f"{options.to} has the number of samples ({len(data.training)}{held_out}), {told}the shape of one, and a digest"
    )
    return OK


def make_parser() -> Parser:
    """The options of the command itself."""
    parser = Parser(
        prog=PROG,
        usage=f"{PROG} RECIPE --to FILE [--labels] [options of the recipe]",
        description="Write the outline of a recipe's data: number and shape of its samples, and their digest, but no "
        "sample. Processes without the first stage train with --data.outline FILE where the data is not.",
    )
    add = parser.add_argument
    add("--to", type=Path, required=True, metavar="FILE", help="the file to write")
    add("--labels", action="store_true", help="write the labels too, for a server that has the last stage")
    return parser
