"""`thinwire eval RUN|RECIPE`: the held-out scores of a model, with compression on and off. Nothing is trained.

RUN is the folder of a run or a checkpoint, or a folder that `thinwire export` wrote. All stages run in this process, as
in `thinwire simulate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thinwire.launch.run import recipe
from thinwire.launch.shared.arguments import Parser
from thinwire.launch.shared.exit_codes import OK, working
from thinwire.launch.shared.progress import showing
from thinwire.launch.shared.strict_json import dumps
from thinwire.launch.shared.tables import document, show

PROG = "thinwire eval"


def main(argv: Sequence[str]) -> int:
    """Evaluate, print a table or JSON, and return the exit status."""
    options, rest = make_parser().parse_known_args(argv)
    recipe.check_place(options.place, rest, PROG)  # before the long imports
    with showing("importing torch"):
        from thinwire.launch.evaluate.score import score, table_of
        from thinwire.launch.run.assembly import prepare
        from thinwire.launch.run.model_files import check_classes
        from thinwire.launch.run.saved import recipe_of

    prepared = prepare(recipe_of(options.place, rest, PROG))
    check_classes(Path(options.place), prepared.data.classes)
    with working(), showing("scoring the held-out samples"):
        scores = score(prepared)
    table = table_of(prepared.recipe.name, scores)
    if options.json:
        print(dumps(document(table.title, [table]), indent=2))
    else:
        show([table])
    return OK


def make_parser() -> Parser:
    """The options of the command itself."""
    parser = Parser(
        prog=PROG,
        usage=f"{PROG} RUN|RECIPE [--json] [options of the recipe]",
        description="Score held-out samples with compression on and off.",
        takes_recipe=True,
    )
    parser.add_argument(
        "place", metavar="RUN|RECIPE", help="the folder of a run, a checkpoint or an export; or a recipe"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
