"""`thinwire eval RUN|RECIPE`: the held-out scores of a model, with compression on and off. Nothing is trained.

RUN is the folder of a run or a checkpoint, or a folder that `thinwire export` wrote. All stages run in this process, as
in `thinwire simulate`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.errors.words import listed
from thinwire.launch.recipe import recipe
from thinwire.launch.shared.arguments import Parser, written
from thinwire.launch.shared.exit_codes import OK, working
from thinwire.launch.shared.progress import showing
from thinwire.launch.shared.strict_json import dumps
from thinwire.launch.shared.tables import Table, document, show
from thinwire.pipeline.errors import OptionsError

if TYPE_CHECKING:
    from thinwire.launch.plan.prepared import Prepared
    from thinwire.models.data.options import DataOptions
    from thinwire.pipeline.evaluation import Compression, Score

PROG = "thinwire eval"


def main(argv: Sequence[str]) -> int:
    """Evaluate, print a table or JSON, and return the exit status."""
    options, rest = make_parser().parse_known_args(argv)
    recipe.check_place(options.place, rest, PROG)  # before the long imports
    with showing("importing torch"):
        from thinwire.launch.folder.model_files import check_classes
        from thinwire.launch.folder.saved_run import recipe_of
        from thinwire.launch.plan.prepare import prepare

    wanted = recipe_of(options.place, rest, PROG)
    if Path(options.place).is_dir() and any(option.startswith("--data.") for option in rest):
        _note_on_training(wanted.data, recipe_of(options.place, [], PROG).data)
    prepared = prepare(wanted)
    check_classes(Path(options.place), prepared.data.classes)
    with working(), showing("scoring the held-out samples"):
        table = _table(prepared.recipe.name, _scores(prepared, options.place))
    prepared.tell_notes()
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
    )
    parser.add_argument(
        "place", metavar="RUN|RECIPE", help="the folder of a run, a checkpoint or an export; or a recipe"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _note_on_training(data: DataOptions, trained: DataOptions) -> None:
    """Say so if samples of the data that a model was trained on are held out now that were not held out then."""
    names = ("evaluation", "held_out", "limit", "split", "subset", "tokenizer")
    others = [f"data.{name}" for name in names if getattr(data, name) != getattr(trained, name)]
    if others and data.name == trained.name and data.evaluation is None:
        print(
            f"{listed(others)} {'is' if len(others) == 1 else 'are'} not as in training, so the model may have been "
            f"trained on what is held out here; name other data with data.evaluation",
            file=sys.stderr,
        )


def _scores(prepared: Prepared, place: str) -> Mapping[Compression, Score]:
    """The held-out scores; only stores on disk are written, in a temporary folder.

    Raises:
        OptionsError: there are none, or the model beside the adapter of the run in `place` has changed.
    """
    from thinwire.launch.folder.saved_run import check_base
    from thinwire.launch.plan.places import simulated_placement
    from thinwire.launch.run.assembly import assemble
    from thinwire.launch.shared.interfaces import alone
    from thinwire.models.data.sampler import evaluation_batches
    from thinwire.pipeline.evaluation import evaluate

    held_out, wanted = prepared.data.held_out, prepared.recipe
    if held_out is None:
        raise OptionsError("an evaluation needs held-out samples; raise data.held_out, or name data.evaluation")
    codecs = wanted.compression
    with alone(), _temporary_folder(codecs.store_folder) as stores:
        passing = replace(prepared, recipe=replace(wanted, compression=replace(codecs, store_folder=stores)))
        assembly = assemble(passing, simulated_placement(passing.recipe), rank=0)
        trainer = assembly.trainer
        check_base(place, wanted.model, (stage.submod for stage in trainer.stages))
        trainer.done = wanted.training.steps  # codecs that change are those of the end
        size, count = wanted.pipeline.pass_size, len(held_out)
        scores = evaluate(trainer, held_out, lambda: evaluation_batches(count, size))
        assembly.close()
    assert scores is not None, "the last stage lives here"
    return scores


def _temporary_folder(chosen: str) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder for stores, in `chosen` if that exists."""
    with written("compression.store_folder", Path(chosen or tempfile.gettempdir()), "folder"):
        return tempfile.TemporaryDirectory(dir=chosen if chosen and Path(chosen).is_dir() else None)


def _table(name: str, scores: Mapping[Compression, Score]) -> Table:
    """The scores as a table, a row for each mode of compression, with advice if the codecs cost too much."""
    from thinwire.pipeline.evaluation import advice

    columns = ["compression", "loss", *scores["on"].metrics, "targets"]
    rows = [[mode, score.loss, *score.metrics.values(), score.num_targets] for mode, score in scores.items()]
    return Table(f"{name}, held out", columns, rows, advice(scores["on"].loss, scores["off"].loss) or "")
