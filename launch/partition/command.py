"""`thinwire partition RECIPE`: the measured cost of each layer, the cut of the recipe, and the best cut.

If a recipe gives no `pipeline.layers`, a run cuts the model by counted costs: every process must find the same cut, and
measured times differ. To use the best cut of measured costs, give it as `pipeline.layers`. If stages are on different
machines, each of them measures all layers, and one puts their files together (`--measured`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from thinwire.launch.recipe import recipe
from thinwire.launch.shared.arguments import Parser
from thinwire.launch.shared.exit_codes import OK
from thinwire.launch.shared.progress import showing
from thinwire.launch.shared.strict_json import dumps
from thinwire.launch.shared.tables import document, say, show

PROG = "thinwire partition"


def main(argv: Sequence[str]) -> int:
    """Print layers and cuts, as tables or as JSON, and return the exit status."""
    options, rest = make_parser().parse_known_args(argv)
    wanted = recipe.parse(rest, prog=PROG)
    from thinwire.launch.partition.examination import examine
    from thinwire.launch.plan.prepare import prepare

    prepared = prepare(wanted)
    with showing("timing the layers"):
        found = examine(prepared, options)
    prepared.tell_notes()
    if options.json:
        measured = {} if found.measured is None else {"measured": found.measured.to_json()}
        title = f"partition of {prepared.recipe.name}"
        print(dumps(document(title, found.tables, layers=found.cut, fits=found.fits, **measured), indent=2))
        return OK
    show(found.tables)
    say(*found.fits, f"to use the best cut: --pipeline.layers '{json.dumps(found.cut)}'")
    return OK


def make_parser() -> Parser:
    """The options of the command itself."""
    parser = Parser(
        prog=PROG,
        usage=f"{PROG} RECIPE [--bandwidth 100mbit] [--memory GB ...] [--measured FILE ...] [--json] "
        "[options of the recipe]",
        description="Measure the cost of each layer of a recipe's model, and find the best cut: the cut whose slowest "
        "stage or link is fastest.",
    )
    parser.add_argument(
        "--bandwidth",
        default="none",
        help="bandwidth of the links, such as 100mbit; then the best cut counts the time of the wire too",
    )
    parser.add_argument(
        "--memory",
        type=float,
        nargs="+",
        metavar="GB",
        help="memory limit of a stage: one number for all stages, or one for each",
    )
    parser.add_argument(
        "--measured",
        nargs="+",
        default=[],
        metavar="FILE",
        help="measure nothing here: FILE is what `thinwire partition RECIPE --json` printed on the machine of a stage, "
        "one for each stage in their order",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
