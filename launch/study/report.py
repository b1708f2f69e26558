"""`thinwire study report NAME`: published numbers beside ours, claims judged, curves, and what is missing.

FOLDER/report.md                 to read
FOLDER/report.json               the tables, for programs, and for `thinwire report`, which makes a page of HTML
FOLDER/curves.png, curves.svg    the learning curves
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pandas import DataFrame

from thinwire.compress.stores.durable import write_own
from thinwire.errors.files import SIGNATURE, as_written
from thinwire.errors.words import listed
from thinwire.launch.run.fields import is_among
from thinwire.launch.shared.arguments import Parser, written
from thinwire.launch.shared.exit_codes import OK
from thinwire.launch.shared.strict_json import dumps
from thinwire.launch.shared.tables import Table, document, show
from thinwire.launch.study.cells import Cell, cells_of
from thinwire.launch.study.definition import Options, Scale, Study, read_study
from thinwire.launch.study.judge import Judged, judge
from thinwire.launch.study.predictions import predicted
from thinwire.launch.study.results import draw, read_results
from thinwire.launch.study.tables import (
    cells_table,
    claims_table,
    missing_table,
    predictions_table,
    scores_table,
)
from thinwire.pipeline.errors import OptionsError

PROG = "thinwire study report"

_PREDICTED = (
    "Nothing was trained or measured here: the numbers are the arithmetic of `thinwire predict`, with the compute "
    "times and bandwidths that the study gives. Codecs cost nothing."
)

_MEANT: Mapping[str, tuple[str, ...]] = {
    "codec": ("compression.activations", "compression.gradients"),
    "training.steps": ("training.epochs",),
    "replicas.count": ("replicas.",),
    "clients.count": ("clients.",),
}
"""The fields that an option changes beside the one of its name."""

_NO_OPTIONS = ("training.seed", "data", "code", "model's files", "own code", "starts_with.")
"""What an origin has beside options, and what each cell has of its own."""


@dataclass(frozen=True)
class StudyReport:
    """What a report says, before it is written in one form or another."""

    title: str
    words: Sequence[str]
    """Sentences that stand at the top."""
    tables: Sequence[Table]
    curves: Mapping[str, bytes]
    """A picture as `png` and as `svg`; empty without a curve."""
    beside: dict[str, Any]
    """What programs may want as well."""


def main(argv: Sequence[str]) -> int:
    """Write a report; the exit status."""
    options = make_parser().parse_args(argv)
    study = read_study(options.name)
    scale_name, scale = study.scaled(options.scale)
    folder = options.folder or Path("studies", study.name, scale_name)
    if not study.prediction:
        _check_folder(folder, cells_of(study, scale, folder))
    made = make(study, scale_name, scale, folder)
    write_and_show(made, options.out or folder, "--out" if options.out or not options.folder else "--folder")
    return OK


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser(prog=PROG, description="Write the report of a study, finished or not.")
    add = parser.add_argument
    add("name", metavar="NAME", help="a packaged study, or the path of a YAML file")
    add("--scale", metavar="S", help="the size that was run (default: the first that the study names)")
    add("--folder", type=Path, metavar="DIR", help="where the cells lie (default: studies/NAME/SCALE)")
    add("--out", type=Path, metavar="DIR", help="where to write (default: beside the cells)")
    return parser


def make(study: Study, scale_name: str, scale: Scale, folder: Path) -> StudyReport:
    """The report of a study, finished or not."""
    rows = study.rows_at(scale)
    words = [study.description, *([f"Scale {scale_name}: {scale.about}"] if scale.about else [])]
    curves, missing = dict[str, bytes](), dict[Cell, str]()
    if study.prediction:
        results = predicted(study, rows)
        judged = [judge(claim, results, study.all_rows, exact=True) for claim in study.claims]
        tables = [predictions_table(study, rows, results), *([claims_table(study, judged)] if judged else [])]
        words.append(_PREDICTED)
    else:
        cells = cells_of(study, scale, folder)
        with as_written(folder, OptionsError):
            results, missing = read_results(study, cells, PROG)
            curves = draw(study, rows, results)
        without = {cell.row for cell in missing}
        judged = [judge(claim, results, study.all_rows, missing=without) for claim in study.claims]
        tables = [scores_table(study, rows, results)]
        tables += [claims_table(study, judged)] if judged else []
        tables += [cells_table(study, results)] if len(results) else []
        tables += [missing_table(missing)] if missing else []
        lost = f" {len(missing)} are missing: the last table names them." if missing else ""
        words.append(f"{len(results)} of {len(cells)} cells are finished.{lost}")
        words += circumstances(study, scale, results)
    beside = {"study": study.name, "scale": scale_name, "finished": len(results), "missing": len(missing)}
    title = study.name if study.prediction else f"{study.name}, {scale_name}"
    return StudyReport(title, words, tables, curves, {**beside, **_claims_json(judged)})


def circumstances(study: Study, scale: Scale, results: DataFrame) -> list[str]:
    """How the finished cells were made, and which should not be compared, a sentence each; empty without cells."""
    if results.empty:
        return []
    made = results["made"]
    machines = {f"{one['machine']['cpu']}, {one['machine']['cores']} cores" for one in made if "machine" in one}
    versions = {f"torch {one['torch']}" for one in made if "torch" in one}
    hours = results["seconds"].sum() / 3600
    said = [f"The finished cells took {hours:.1f} hours, on {'; '.join(sorted(machines | versions))}."]
    origins = made.map(lambda one: {name: json.dumps(value) for name, value in one.get("origin", {}).items()})
    codes = sorted({str(json.loads(one["code"])) for one in origins if "code" in one})
    if len(codes) > 1:
        said.append(f"They were made by {len(codes)} versions of the code: {', '.join(codes)}.")
    by_data = results["row"].groupby(origins.map(lambda one: one.get("data", "")), sort=False).unique()
    if len(by_data) > 1:
        groups = " | ".join(map("; ".join, by_data))
        said.append(f"There are {len(by_data)} sets of data; compare only rows that have the same: {groups}.")
    values: dict[str, set[str]] = {}
    for cell, origin in zip(results["cell"], origins, strict=True):
        own = study.own_options(scale, cell.row)
        for name in origin.keys() - ({"model.weights"} if cell.base else set()):
            if not is_among(name, _NO_OPTIONS) and not _is_set(name, own):
                values.setdefault(name, set()).add(origin[name])
    differ = [f"{name} ({', '.join(sorted(found))})" for name, found in sorted(values.items()) if len(found) > 1]
    if differ:
        said.append(
            f"The cells differ in options that no row sets, so do not compare their scores: {'; '.join(differ)}."
        )
    return said


def _is_set(name: str, own: Options) -> bool:
    """Whether one of a row's own options changes a field."""
    return any(is_among(name, (option, f"{option}.", *_MEANT.get(option, ()))) for option in own)


def _check_folder(folder: Path, cells: Sequence[Cell]) -> None:
    """Raise OptionsError if a folder is none of this study: a report would stand beside what is not its own."""
    if not folder.is_dir():
        raise OptionsError(
            f"--folder must name the folder of a study, and {folder} does not exist; run the study first"
        )
    there = {path.parent for path in folder.glob("cells/*/*/cell.json")}
    if not there.intersection(cell.folder for cell in cells):
        what = "cells of another study or scale" if there else "no cells"
        raise OptionsError(f"--folder must name the folder of this study, and {folder} has {what}")


def _claims_json(judged: Sequence[Judged]) -> dict[str, Any]:
    """What the claims come to, and each of them."""
    claims = [
        {
            "claim": one.claim.claim,
            "verdict": one.verdict,
            "seeds": list(one.seeds),
            "difference": one.mean,
            "standard_error": one.error,
            "published": one.published,
        }
        for one in judged
    ]
    return {"verdicts": dict(Counter(one.verdict for one in judged)), "claims": claims}


def write_and_show(made: StudyReport, folder: Path, option: str) -> None:
    """Write every form of a report, and print its first tables.

    OptionsError where it cannot be written; `option` is the one that names another folder.
    """
    head = [f"<!-- {SIGNATURE} -->", f"# {made.title}", *made.words]
    pictures = ["![Learning curves](curves.png)"] if made.curves else []
    values = document(made.title, made.tables, words=list(made.words), **made.beside)
    forms = {
        "report.md": ("\n\n".join([*head, *(table.markdown for table in made.tables), *pictures]) + "\n").encode(),
        "report.json": f"{dumps({'generator': SIGNATURE, **values}, indent=2)}\n".encode(),
        **{f"curves.{kind}": picture for kind, picture in made.curves.items()},
    }
    with written(option, folder, "folder"):
        folder.mkdir(parents=True, exist_ok=True)
    for name, content in forms.items():
        with written(option, folder / name, "folder"):
            write_own(folder / name, content)
    show(made.tables[:2])
    print(f"{listed([*forms])} are in {folder}")
