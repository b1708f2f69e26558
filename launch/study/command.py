"""`thinwire study`: run every cell of a study, and write its report.

    thinwire study                               the packaged studies
    thinwire study NAME [--scale S] [--option value ...]
    thinwire study NAME --report                 only the report, of what is finished

A cell that is finished is not run again while its recipe, its data and the code are the same; one that was stopped goes
on from its newest checkpoint. Any option of a recipe may follow: it is for all cells.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile

from thinwire.compress.stores.marks import claim
from thinwire.launch.recipe.yaml_text import descriptions
from thinwire.launch.shared import scratch
from thinwire.launch.shared.arguments import Parser, at_least_one, written
from thinwire.launch.shared.control_groups import cores
from thinwire.launch.shared.exit_codes import OK, FailedError, StoppedError
from thinwire.launch.shared.output import lasting
from thinwire.launch.shared.signals import gathered_signals
from thinwire.launch.shared.tables import Table, show
from thinwire.launch.study.cells import PROG, Cell, State, cells_of, check, find, sets, typed
from thinwire.launch.study.definition import PACKAGED, Options, read_study
from thinwire.launch.study.engine import Job, run_jobs
from thinwire.pipeline.errors import OptionsError

_FATES: Mapping[State, str] = {
    "finished": "already finished",
    "goes on": "to go on from a checkpoint",
    "begins": "to begin",
    "begins anew": "to begin anew",
}
"""The states of cells in words, to follow their number."""


_OF_CELLS = {
    "training.seed": "; the field seeds of the study names them",
    "output": "; --folder is for all",
    "name": "",
}
"""Options of a recipe that every cell has of its own, and what to use in their place."""


def main(argv: Sequence[str]) -> int:
    """Run a study and write its report, or list the packaged studies; return the exit status."""
    if not argv:
        show([Table("the packaged studies", ("study", "question"), list(descriptions(PACKAGED).items()))])
        return OK
    return _run(argv)


@lasting()
def _run(argv: Sequence[str]) -> int:
    options, given = make_parser().parse_known_args(argv)
    if given and not given[0].startswith("--"):
        what = f"write {PROG} {given[0]} --report" if options.name == "report" else f"see {PROG} --help"
        raise OptionsError(f"one NAME is enough, got {given[0]!r} as well; {what}")
    from thinwire.launch.study.report import write_and_show  # of a page, whose libraries take a tenth of a second

    study = read_study(options.name)
    scale_name, scale = study.scaled(options.scale)
    folder = options.folder or Path("studies", study.name, scale_name)
    if options.report:
        write_and_show(study, scale_name, scale, folder)
        return OK
    chosen = _chosen(cells_of(study, scale, folder, given), options.row)
    _refuse_own([study.all_rows[cell.row].options for cell in chosen], given)
    jobs, states = [], dict[Path | None, State]()
    for cell, (origin, wanted) in zip(chosen, check(chosen, study.score), strict=True):
        state, changed = find(cell, origin, any_code=options.any_code, base=states.get(cell.base))
        states[cell.folder] = state
        steps, threads = wanted.training.steps, wanted.training.threads
        jobs.append(Job(cell, origin, steps, threads, state, changed, "finished" if state == "finished" else "waits"))
    at_once = options.jobs or max(1, cores() // max(job.threads for job in jobs))
    _print_states(jobs, folder, at_once)
    if options.check:
        for job in jobs:
            print(f"  {job.cell.name}: {_FATES[job.state]}, {job.steps} steps")
        return OK
    _hold(folder)
    with gathered_signals() as came:
        run_jobs(jobs, at_once, study, came)
    if not came and any(job.status == "finished" for job in jobs):
        write_and_show(study, scale_name, scale, folder)
    _conclude(jobs, folder, came)
    return OK


def make_parser() -> Parser:
    """The options of the command itself."""
    parser = Parser(
        prog=PROG,
        usage=f"{PROG} NAME [options] [--option-of-a-recipe value ...]",
        description="Train every row of a study with every seed, go on where it stopped, and write a report. "
        "`thinwire study` lists the packaged studies.",
    )
    add = parser.add_argument
    add("name", metavar="NAME", help="a packaged study, or the path of a YAML file")
    add("--scale", metavar="S", help="a size that the study names, as small or full (default: the first)")
    add("--folder", type=Path, metavar="DIR", help="the folder of the cells (default: studies/NAME/SCALE)")
    add(
        "--jobs",
        type=at_least_one,
        metavar="N",
        help="cells to run at the same time (default: as many as the cores allow)",
    )
    add("--row", action="append", default=[], metavar="ROW", help="run only this row; repeat the option for more rows")
    add("--any-code", action="store_true", help="keep finished cells of another version of the code")
    add("--check", action="store_true", help="check all cells and print what would run, but run nothing")
    add("--report", action="store_true", help="write the report of what is finished, but run nothing")
    return parser


def _refuse_own(rows: Sequence[Options], given: Sequence[str]) -> None:
    """Raise OptionsError for options that every row to train sets itself: they would change nothing."""
    names = typed(given)
    OptionsError.require(
        *(
            (False, f"--{name} must be left out: a study gives each cell its own{_OF_CELLS[name]}")
            for name in sorted(names.keys() & _OF_CELLS.keys())
        ),
        *(
            (
                not all(sets(own, name) for own in rows),
                f"--{name} must be left out: every row to train sets it itself, and keeps its own",
            )
            for name in sorted(names)
        ),
    )


def _chosen(cells: Sequence[Cell], rows: Sequence[str]) -> list[Cell]:
    """The cells of the named rows, or of all rows if none is named. OptionsError for names that no row has."""
    known = list(dict.fromkeys(cell.row for cell in cells))
    OptionsError.require(
        *(
            (row in known, f"--row must be a row of the study at this scale, got {row!r}; known: {'; '.join(known)}")
            for row in dict.fromkeys(rows)
        )
    )
    needed = {cell.folder for cell in cells if not rows or cell.row in rows}
    for cell in reversed(cells):  # a base stands before those that start with it
        needed |= {cell.base} if cell.base and cell.folder in needed else set()
    return [cell for cell in cells if cell.folder in needed]


def _print_states(jobs: Sequence[Job], folder: Path, at_once: int) -> None:
    """Print the states of the cells, and why some cells begin anew."""
    counts = Counter(job.state for job in jobs)
    said = ", ".join(f"{counts[state]} {words}" for state, words in _FATES.items() if counts[state])
    print(f"{len(jobs)} cells in {folder}: {said}; {at_once} at once", flush=True)
    for job in jobs:
        if job.changed:
            print(f"{job.cell.name} begins anew, because these have changed: {', '.join(job.changed)}", flush=True)


def _hold(folder: Path) -> None:
    """Keep other studies out of the folder until this process ends."""
    with written("--folder", folder, "folder"):
        claim(folder / "cells", "")
        try:
            scratch.lock(folder)
        except BlockingIOError as error:
            raise OptionsError(
                f"--folder must name a folder that no other study uses, but a study writes to {folder} now; wait until "
                f"it has ended, or name another"
            ) from error
        with TemporaryFile(dir=folder / "cells"):  # a folder that is there may be one that nobody can write
            pass


def _conclude(jobs: Sequence[Job], folder: Path, came: Sequence[signal.Signals]) -> None:
    """Print how the study ended. StoppedError if a signal came, FailedError if some cells failed."""
    done = sum(job.status == "finished" for job in jobs)
    said = f"{done} of {len(jobs)} cells are finished, in {folder}"
    if came:
        raise StoppedError(f"stopped; {said}; the same command goes on", came[0])
    if failed := [job.cell.name for job in jobs if job.status == "failed"]:
        raise FailedError(f"{said}; these failed: {'; '.join(failed)}")
    print(said)
