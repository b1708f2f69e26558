"""`thinwire eval RUN|RECIPE`: the held-out scores of a model, with compression on and off. Nothing is trained.

RUN is the folder of a run or a checkpoint, or a folder that `thinwire export` wrote. All stages run in this process, as
in `thinwire simulate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thinwire.errors.names import did_you_mean
from thinwire.launch.run import recipe
from thinwire.launch.shared.arguments import Parser
from thinwire.launch.shared.exit_codes import OK, working
from thinwire.launch.shared.progress import telling
from thinwire.launch.shared.strict_json import dumps
from thinwire.launch.shared.tables import document, show
from thinwire.pipeline.errors import OptionsError

PROG = "thinwire eval"


def main(argv: Sequence[str]) -> int:
    """Evaluate, print a table or JSON, and return the exit status."""
    options, rest = make_parser().parse_known_args(argv)
    if not _holds_recipe(Path(options.place)):
        _check_recipe(options.place)
        recipe.parse([options.place, *rest], prog=PROG)  # which finds mistakes before the long imports
    with telling("importing torch"):
        from thinwire.launch.evaluate.score import recipe_of, score, table_of
        from thinwire.launch.run.assembly import prepare
        from thinwire.launch.run.model_files import check_classes

    prepared = prepare(recipe_of(options.place, rest, PROG))
    check_classes(Path(options.place), prepared.data.classes)
    with working(), telling("scoring the held-out samples"):
        scores = score(prepared)
    table = table_of(prepared.recipe.name, scores)
    if options.json:
        print(dumps(document(table.title, [table]), indent=2))
    else:
        show([table])
    return OK


def _holds_recipe(place: Path) -> bool:
    """Whether a place may be the folder of a run, of an export, of checkpoints or of one checkpoint."""
    files = (place / "recipe.yaml", place / "manifest.json", *place.glob("step-*/manifest.json"))
    return any(path.is_file() for path in files)


def _check_recipe(place: str) -> None:
    """Refuse what is no recipe either."""
    known = recipe.packaged_names()
    if place not in known and not Path(place).is_file():
        raise OptionsError(
            "RUN|RECIPE must be the folder of a run, a checkpoint or an export, a packaged recipe, or the path of a "
            f"YAML file, got {place!r}{did_you_mean(place, known)}; thinwire recipes lists the packaged ones"
        )


def make_parser() -> Parser:
    """The options of the command itself."""
    parser = Parser(
        prog=PROG,
        usage=f"{PROG} RUN|RECIPE [--json] [options of the recipe]",
        description="Score held-out samples with compression on and off.",
        allow_abbrev=False,
        takes_recipe=True,
    )
    parser.add_argument(
        "place", metavar="RUN|RECIPE", help="the folder of a run, a checkpoint or an export; or a recipe"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
