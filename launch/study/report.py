"""The report of a study: published numbers beside ours, claims judged, curves, and what is missing.

FOLDER/report.html    a page in one file
FOLDER/report.md      its tables, to quote
FOLDER/report.json    the same for programs
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from thinwire.compress.stores.durable import write_own
from thinwire.errors.files import SIGNATURE, as_written
from thinwire.errors.words import listed
from thinwire.launch.comparison.comparison import Comparison, Groups, cost_table, loss_charts, scores_of
from thinwire.launch.comparison.page import render
from thinwire.launch.comparison.runs import MODES, RunFiles, read_run, unit_of
from thinwire.launch.recipe.fields import WITHOUT_EFFECT, is_among
from thinwire.launch.shared.arguments import written
from thinwire.launch.shared.strict_json import dumps
from thinwire.launch.shared.tables import Table, Value, document, rounded, show
from thinwire.launch.study.cells import (
    Cell,
    State,
    asked_of,
    cells_of,
    find,
    last_line,
    read_json,
    sets,
    typed,
)
from thinwire.launch.study.definition import Row, Scale, Study
from thinwire.launch.study.judge import RULE, Judged, bound_of, judge
from thinwire.pipeline.errors import OptionsError


def make(study: Study, scale_name: str, scale: Scale, folder: Path) -> tuple[Comparison, dict[str, Any]]:
    """The report of a study, finished or not, and what programs may want as well."""
    rows, cells = study.rows_at(scale), cells_of(study, scale, folder)
    missing = missing_cells(cells)
    with as_written(folder, OptionsError):
        runs = {cell: read_run(cell.folder) for cell in cells if cell not in missing}
    groups = {row: [run for cell, run in runs.items() if cell.row == row] for row in rows}
    scores = scores_of(groups, [study.score])[study.score].reset_index()
    without = {cell.row for cell in missing}
    judged = [judge(claim, scores, study.all_rows, missing=without) for claim in study.claims]
    claims = [{**asdict(one), "claim": one.claim.claim} for one in judged]
    made = {cell: read_json(cell.folder / "cell.json") for cell in runs}
    tables = [
        scores_table(study, rows, groups),
        claims_table(study, judged),
        cells_table(study, runs, made),
        Table("Missing cells", ["row", "seed", "why"], [[c.row, c.seed, why] for c, why in missing.items()]),
    ]
    lost = f" {len(missing)} are missing: the last table names them." if missing else ""
    words = [
        study.description,
        *([f"Scale {scale_name}: {scale.about}"] if scale.about else []),
        f"{len(runs)} of {len(cells)} cells are finished.{lost}",
        *circumstances(rows, made, sum(run.summary["seconds"] for run in runs.values()) / 3600),
    ]
    charts = loss_charts({row: its for row, its in groups.items() if its}) if runs else []
    beside = {"study": study.name, "scale": scale_name, "finished": len(runs), "missing": len(missing)}
    beside |= {"verdicts": dict(Counter(one.verdict for one in judged)), "claims": claims}
    shown = [table for table in tables if table.rows]
    return Comparison(f"{study.name}, {scale_name}", shown, charts, words=words), beside


def missing_cells(cells: Sequence[Cell]) -> dict[Cell, str]:
    """The cells without a result that the study would keep, and why.

    Those of another version of the code, or of other data, have one. OptionsError if recipes cannot be read.
    """
    missing, states = {}, dict[Path | None, State]()
    # what was typed when a cell was made is no change of the study
    as_made = [replace(cell, given=tuple(read_json(cell.folder / "cell.json").get("given", ()))) for cell in cells]
    for cell, asked in zip(cells, asked_of(as_made), strict=True):
        states[cell.folder], changed = find(cell, asked, any_code=True, base=states.get(cell.base))
        if changed:
            missing[cell] = f"these have changed: {', '.join(changed)}; run it again"
        elif states[cell.folder] != "finished":
            said = last_line(cell.folder / "log.txt")
            begun = (cell.folder / "cell.json").exists()
            missing[cell] = f"not finished{f'; its last line: {said}' if said else ''}" if begun else "not begun"
    return missing


def circumstances(rows: Mapping[str, Row], made: Mapping[Cell, Mapping[str, Any]], hours: float) -> list[str]:
    """How the finished cells were made, and which should not be compared, a sentence each; empty without cells.

    `made` has the values of each cell.json, and `hours` is what all cells took.
    """
    if not made:
        return []
    machines = {
        f"{one['machine']['cpu']}, {one['machine']['cores']} cores" for one in made.values() if "machine" in one
    }
    versions = {f"torch {one['torch']}" for one in made.values() if "torch" in one}
    said = [f"The finished cells took {hours:.1f} hours, on {'; '.join(sorted(machines | versions))}."]
    codes = {one["origin"]["code"] for one in made.values() if "code" in one.get("origin", {})}
    if len(codes) > 1:
        said.append(f"They were made by {len(codes)} versions of the code: {', '.join(sorted(codes))}.")
    by_data: dict[str, dict[str, None]] = {}
    for cell, one in made.items():
        by_data.setdefault(json.dumps(one.get("origin", {}).get("data")), {})[cell.row] = None
    if len(by_data) > 1:
        groups = " | ".join(map("; ".join, by_data.values()))
        said.append(f"There are {len(by_data)} sets of data; compare only rows that have the same: {groups}.")
    given = [(rows[cell.row].options, typed(one.get("given", ()))) for cell, one in made.items()]
    names = dict.fromkeys(name for _, its in given for name in its if not is_among(name, WITHOUT_EFFECT))
    values = {name: {its.get(name, "not given") for own, its in given if not sets(own, name)} for name in names}
    if differ := [f"{name} ({', '.join(sorted(found))})" for name, found in values.items() if len(found) > 1]:
        said.append(
            f"The cells were run with unlike options of the command line, so do not compare their scores: "
            f"{'; '.join(differ)}."
        )
    return said


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


def scores_table(study: Study, rows: Mapping[str, Row], groups: Groups) -> Table:
    """A row of the study a line, beside the published scores; the first uncompressed row is the baseline."""
    published = {name: dict(row.published) for name, row in rows.items() if row.published}
    against = next((name for name, its in groups.items() if its and all(run.is_uncompressed for run in its)), "")
    title = f"{study.source or study.name}: {'published and ours' if published else 'scores'}"
    notes = [f"{name}: {row.note}." for name, row in rows.items() if row.note]
    bases = groups.get(against, [])
    return cost_table(title, "row", groups, against, bases, scores=[study.score], published=published, notes=notes)


def claims_table(study: Study, judged: Sequence[Judged]) -> Table:
    """A claim a line, with its differences and what they say."""
    columns = ["claim", "difference", "holds if", "published", "ours", "standard error", "seeds", "judged"]
    lines: list[list[Value]] = []
    for one in judged:
        of, minus, (number, side) = one.claim.of, one.claim.minus, bound_of(one.claim)
        compared = f"{of.row} {of.mode} - {minus.row} {minus.mode}"
        bound = f"{'above' if side > 0 else 'below'} {number:g}"
        numbers = map(_in_digits, (one.published, one.difference, one.standard_error))
        lines.append([one.claim.claim, compared, bound, *numbers, len(one.seeds), one.verdict])
    unit = " in percentage points" if unit_of(study.score) else ""
    return Table("Claims", columns, lines, f"Differences are of {study.score}{unit}. {RULE}")


def _in_digits(number: float | None) -> float | None:
    """A number with three decimals, or more where fewer than two of its digits would be left."""
    return rounded(number, max(3, 1 - math.floor(math.log10(abs(number)))) if number else 3)


def cells_table(study: Study, runs: Mapping[Cell, RunFiles], made: Mapping[Cell, Mapping[str, Any]]) -> Table:
    """A finished cell a line."""
    columns = ["row", "seed", *(f"{study.score} {mode}" for mode in MODES), "minutes", "weights digest", "code"]
    lines: list[list[Value]] = []
    for cell, run in runs.items():
        ours = [rounded(run.score(mode, study.score), 3) for mode in MODES]
        took, digest = round(run.summary["seconds"] / 60, 1), run.summary["weights_digest"][:16]
        lines.append([cell.row, cell.seed, *ours, took, digest, made[cell].get("origin", {}).get("code")])
    note = "Minutes of a run, with evaluations and saves, on a machine that may have had other work."
    return Table("Finished cells", columns, lines, note)


def write_and_show(study: Study, scale_name: str, scale: Scale, folder: Path) -> None:
    """Write every form of a report into the folder of the cells, and print its first tables.

    OptionsError if the folder is none of this study, or cannot be written.
    """
    _check_folder(folder, cells_of(study, scale, folder))
    made, beside = make(study, scale_name, scale, folder)
    head = [f"<!-- {SIGNATURE} -->", f"# {made.title}", *made.words]
    values = document(made.title, made.tables, words=list(made.words), **beside)
    forms = {
        "report.html": render([], made),
        "report.md": "\n\n".join([*head, *(table.markdown for table in made.tables)]) + "\n",
        "report.json": f"{dumps({'generator': SIGNATURE, **values}, indent=2)}\n",
    }
    for name, content in forms.items():
        with written("--folder", folder / name, "folder"):
            write_own(folder / name, content.encode())
    show(made.tables[:2])
    print(f"{listed([*forms])} are in {folder}")
