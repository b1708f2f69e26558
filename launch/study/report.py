"""`thinwire study report NAME`: published numbers beside ours, claims judged, curves, and what is missing.

FOLDER/report.md                 to read
FOLDER/report.json               the tables, for programs, and for `thinwire report`, which makes a page of HTML
FOLDER/curves.png, curves.svg    the learning curves
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pandas import DataFrame

from thinwire.compress.stores.durable import write_own
from thinwire.errors.files import SIGNATURE, as_written
from thinwire.errors.words import listed
from thinwire.launch.recipe.fields import is_among
from thinwire.launch.shared.arguments import Parser, written
from thinwire.launch.shared.exit_codes import OK
from thinwire.launch.shared.strict_json import dumps
from thinwire.launch.shared.tables import Table, Value, document, rounded, show
from thinwire.launch.study.cells import Cell, cells_of
from thinwire.launch.study.definition import MODES, Claim, Options, Row, Scale, Study, read_study
from thinwire.launch.study.judge import RULE, Judged, bound_of, judge
from thinwire.launch.study.results import draw, read_results
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.frames import CHANNELS

PROG = "thinwire study report"

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
    cells = cells_of(study, scale, folder)
    with as_written(folder, OptionsError):
        results, missing = read_results(study, cells, PROG)
        curves = draw(study, rows, results)
    without = {cell.row for cell in missing}
    judged = [judge(claim, results, study.all_rows, missing=without) for claim in study.claims]
    tables = [
        scores_table(study, rows, results),
        *([claims_table(study, judged)] if judged else []),
        *([cells_table(study, results)] if len(results) else []),
        *([missing_table(missing)] if missing else []),
    ]
    lost = f" {len(missing)} are missing: the last table names them." if missing else ""
    words.append(f"{len(results)} of {len(cells)} cells are finished.{lost}")
    words += circumstances(study, scale, results)
    beside = {"study": study.name, "scale": scale_name, "finished": len(results), "missing": len(missing)}
    return StudyReport(f"{study.name}, {scale_name}", words, tables, curves, {**beside, **_claims_json(judged)})


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


def scores_table(study: Study, rows: Mapping[str, Row], results: DataFrame) -> Table:
    """A row of the study a line: published scores, ours with their spread, and the bits that were sent."""
    score = f"{study.score}, {study.unit}" if study.unit else study.score
    published = any(row.published for row in rows.values())
    columns = [
        "row",
        *(f"published {mode}" for mode in MODES if published),
        *(f"{score} {mode}, {what}" for mode in MODES for what in ("mean", "std", "best")),
        "on - off",
        *(f"bits, {channel}" for channel in CHANNELS),
        "in full, %",
        "seeds",
    ]
    lines: list[list[Value]] = []
    diverged = dict[str, int]()
    for name, row in rows.items():
        of_row = results[results["row"] == name]
        own = of_row.dropna(subset=[*MODES])
        diverged[name] = len(of_row) - len(own)
        best = own[[*MODES]].min() if study.score in ("loss", "perplexity") else own[[*MODES]].max()
        spread = [number for mode in MODES for number in (own[mode].mean(), own[mode].std(), best[mode])]
        lines.append(
            [
                name,
                *(row.published.get(mode) for mode in MODES if published),
                *(rounded(number, 3) for number in [*spread, (own["on"] - own["off"]).mean()]),
                *(rounded(of_row[channel].mean(), 2) for channel in CHANNELS),
                rounded(100 * of_row["full"].mean(), 1),
                len(own),
            ]
        )
    note = (
        "Off and on: whether evaluation compressed. Mean, standard deviation and best are over seeds, after the last "
        "step. Bits an element were really sent in training: frames with their headers, warm-up and first visits "
        "included; in full is the share of rows that went uncompressed."
    )
    lost = [f"{name}: diverged seeds, which have no score: {count}." for name, count in diverged.items() if count]
    title = f"{study.source or study.name}: {'published and ours' if published else 'scores'}"
    return Table(title, columns, lines, " ".join([note, *lost, *_notes(rows)]))


def claims_table(study: Study, judged: Sequence[Judged]) -> Table:
    """A claim a line, with its differences and what they say."""
    columns = ["claim", "difference", "holds if", "published", "ours", "standard error", "seeds", "judged"]
    lines: list[list[Value]] = []
    for one in judged:
        number, side = bound_of(one.claim)
        bound = f"{'above' if side > 0 else 'below'} {number:g}"
        numbers = map(_in_digits, (one.published, one.mean, one.error))
        lines.append([one.claim.claim, _compared(study, one.claim), bound, *numbers, len(one.seeds), one.verdict])
    unit = " in percentage points" if study.unit == "%" else ""
    return Table("Claims", columns, lines, f"Differences are of {study.score}{unit}. {RULE}")


def _compared(study: Study, claim: Claim) -> str:
    """The scores of a claim, and what is made of them."""
    names = {side: f"{side.row} {side.mode}" for side in claim.sides.values()}
    first = f"{names[claim.of]} {'-' if claim.minus else '/'} {names[claim.other]}"
    return f"({first}) - ({names[claim.than.of]} - {names[claim.than.minus]})" if claim.than else first


def _in_digits(number: float | None) -> float | None:
    """A number with three decimals, or more where fewer than two of its digits would be left."""
    return rounded(number, max(3, 1 - math.floor(math.log10(abs(number)))) if number else 3)


def cells_table(study: Study, results: DataFrame) -> Table:
    """A finished cell a line."""
    columns = ["row", "seed", *(f"{study.score} {mode}" for mode in MODES), "minutes", "weights digest", "code"]
    lines: list[list[Value]] = [
        [
            *(one.row, one.seed, *(rounded(getattr(one, mode), 3) for mode in MODES)),
            *(round(one.seconds / 60, 1), one.digest[:16], one.made.get("origin", {}).get("code")),
        ]
        for one in results.itertuples()
    ]
    note = "Minutes of a run, with evaluations and saves, on a machine that may have had other work."
    return Table("Finished cells", columns, lines, note)


def missing_table(missing: Mapping[Cell, str]) -> Table:
    """A cell without a result a line."""
    lines: list[list[Value]] = [[cell.row, cell.seed, why] for cell, why in missing.items()]
    return Table("Missing cells", ["row", "seed", "why"], lines)


def _notes(rows: Mapping[str, Row]) -> list[str]:
    """The notes of the rows, a sentence each."""
    return [f"{name}: {row.note}." for name, row in rows.items() if row.note]


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
