"""`thinwire study report NAME`: published numbers beside ours, claims judged, curves, and what is missing.

FOLDER/report.md, report.html    the same, to read; the page needs nothing but itself
FOLDER/report.json               the tables, for programs and for `thinwire report`
FOLDER/curves.png                the learning curves
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.compress.stores.durable import write_own
from thinwire.errors import ThinwireError
from thinwire.errors.files import SIGNATURE, as_written
from thinwire.launch.shared import pages
from thinwire.launch.shared.arguments import Parser
from thinwire.launch.shared.exit_codes import OK
from thinwire.launch.shared.strict_json import dumps
from thinwire.launch.shared.tables import Table, document, show
from thinwire.launch.study.cells import Cell, cells_of, rows_of
from thinwire.launch.study.circumstances import circumstances
from thinwire.launch.study.curves import draw
from thinwire.launch.study.definition import Row, Scale, Signal, Study, read_study
from thinwire.launch.study.energy import Measures, energy_of
from thinwire.launch.study.judge import Judged, judge
from thinwire.launch.study.results import Result, read_results, read_twice
from thinwire.launch.study.tables import (
    cells_table,
    claims_table,
    energy_table,
    missing_table,
    predictions_table,
    scores_table,
    twice_table,
)
from thinwire.pipeline.errors import OptionsError

PROG = "thinwire study report"

_PREDICTED = (
    "Nothing was trained or measured here: the numbers are the arithmetic of `thinwire predict`, with the compute "
    "times and bandwidths that the study gives. Codecs cost nothing."
)


@dataclass(frozen=True)
class StudyReport:
    """What a report says, before it is written in one form or another."""

    title: str
    words: Sequence[str]
    """Sentences that stand at the top."""
    tables: Sequence[Table]
    curves: bytes
    """A picture as PNG; empty without a curve."""
    beside: dict[str, Any]
    """What programs may want as well."""


def main(argv: Sequence[str]) -> int:
    """Write a report; the exit status."""
    options = _parser().parse_args(argv)
    study = read_study(options.name)
    scale_name, scale = study.scaled(options.scale)
    folder = options.folder or Path("studies", study.name, scale_name)
    if not study.prediction:
        _check_folder(folder, cells_of(study, scale, folder))
    made = make(study, scale_name, scale, folder)
    write_and_show(made, options.out or folder, "--out" if options.out or not options.folder else "--folder")
    return OK


def write_and_show(made: StudyReport, folder: Path, option: str) -> None:
    """Write every form of a report, and print its first tables.

    OptionsError where it cannot be written; `option` is the one that names another folder.
    """
    _write(made, folder, option)
    show(made.tables[:2])
    forms = ["report.md", "report.html", "report.json", *(["curves.png"] if made.curves else [])]
    print(f"{', '.join(forms[:-1])} and {forms[-1]} are in {folder}")


def make(study: Study, scale_name: str, scale: Scale, folder: Path) -> StudyReport:
    """The report of a study, finished or not."""
    rows = rows_of(study, scale)
    if study.prediction:
        return _of_predictions(study, scale_name, scale, rows)
    cells = cells_of(study, scale, folder)
    with as_written(folder, OptionsError):
        results, missing = read_results(study, cells)
        curves = draw(study, rows, results)
    measured, unmeasured = _energies(study, results)
    results = [replace(result, energies=_shares(measured.get(result.cell, {}))) for result in results]
    judged = [judge(claim, results, study.all_rows) for claim in study.claims]
    tables = [scores_table(study, rows, results)]
    tables += [claims_table(study, judged)] if judged else []
    tables += [energy_table(study, rows, measured)] if measured else []
    tables += [cells_table(study, results)] if results else []
    twice = read_twice(cells, folder)
    tables += [twice_table(twice)] if twice else []
    tables += [missing_table(missing)] if missing else []
    words = _question(study, scale_name, scale)
    words.append(f"{len(results)} of {len(cells)} cells are finished.{_missing_words(len(missing))}")
    words += [*circumstances(study, scale, results), *unmeasured]
    beside = {"study": study.name, "scale": scale_name, "finished": len(results), "missing": len(missing)}
    return StudyReport(
        f"{study.name}, {scale_name}",
        words,
        tables,
        curves,
        {**beside, **_claims_json(judged)},
    )


def _question(study: Study, scale_name: str, scale: Scale) -> list[str]:
    """What the study asks, and what its scale is."""
    return [study.description, *([f"Scale {scale_name}: {scale.about}"] if scale.about else [])]


def _energies(study: Study, results: Sequence[Result]) -> tuple[dict[Cell, dict[Signal, Measures]], list[str]]:
    """What crosses the cuts of the finished cells, if the study asks for it, and a sentence for each that has none."""
    found, mistakes = {}, []
    for cell in [result.cell for result in results if study.energy is not None]:
        assert study.energy is not None, "the study asks for it"
        try:
            found[cell] = energy_of(cell, study.energy, PROG)
        except ThinwireError as error:
            mistakes.append(f"{cell.name}: what crosses its cuts is not measured: {'; '.join(error.mistakes)}.")
    return found, mistakes


def _shares(signals: Mapping[Signal, Measures]) -> dict[Signal, float]:
    """The share of the energy of each signal that has one."""
    return {signal: share for signal, one in signals.items() if (share := one["energy"]) is not None}


def _of_predictions(study: Study, scale_name: str, scale: Scale, rows: Mapping[str, Row]) -> StudyReport:
    """The report of a study whose cells are predictions, which are computed here."""
    from thinwire.launch.study.predictions import predicted

    results = predicted(study, rows)
    judged = [judge(claim, results, study.all_rows, exact=True) for claim in study.claims]
    tables = [predictions_table(study, rows, results), *([claims_table(study, judged)] if judged else [])]
    words = [*_question(study, scale_name, scale), _PREDICTED]
    beside = {"study": study.name, "scale": scale_name, "finished": len(results), "missing": 0}
    return StudyReport(study.name, words, tables, b"", {**beside, **_claims_json(judged)})


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


def _parser() -> Parser:
    parser = Parser(prog=PROG, description="Write the report of a study, finished or not.")
    add = parser.add_argument
    add("name", metavar="NAME", help="a packaged study, or the path of a YAML file")
    add("--scale", metavar="S", help="the size that was run (default: the first that the study names)")
    add("--folder", type=Path, metavar="DIR", help="where the cells lie (default: studies/NAME/SCALE)")
    add("--out", type=Path, metavar="DIR", help="where to write (default: beside the cells)")
    return parser


def _missing_words(count: int) -> str:
    return f" {count} are missing: the last table names them." if count else ""


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


def _write(made: StudyReport, folder: Path, option: str) -> None:
    """Write every form of a report. OptionsError where that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if made.curves:
            write_own(folder / "curves.png", made.curves)
        write_own(folder / "report.md", _markdown(made).encode())
        write_own(folder / "report.html", _html(made).encode())
        values = document(made.title, made.tables, words=list(made.words), **made.beside)
        values = {"generator": SIGNATURE, **values}
        write_own(folder / "report.json", f"{dumps(values, indent=2)}\n".encode())
    except OSError as error:
        place = error.filename or folder
        raise OptionsError(f"{option} must name a folder that can be written, got {place}: {error.strerror}") from error


def _markdown(made: StudyReport) -> str:
    picture = ["![Learning curves](curves.png)"] if made.curves else []
    head = [f"<!-- {SIGNATURE} -->", f"# {made.title}", *made.words]
    return "\n\n".join([*head, *(table.markdown for table in made.tables), *picture]) + "\n"


def _html(made: StudyReport) -> str:
    picture = base64.b64encode(made.curves).decode()
    return pages.render(
        "thinwire.launch.study", "study.html", brand="Thinwire study", title=made.title, made=made, picture=picture
    )
