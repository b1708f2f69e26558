"""The cells while they run: a live table on a terminal; elsewhere a line now and then, so that logs stay readable."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from rich.box import SIMPLE
from rich.console import Console
from rich.live import Live
from rich.table import Table

from thinwire.launch.study.definition import MODES, Study
from thinwire.launch.study.engine import CellProgress, Status
from thinwire.launch.study.progress import read_json

SILENCE = 30.0
"""Seconds after which a study without a terminal says how far it is."""
_AROUND = 8
"""Lines of a terminal that are not for cells."""
_ORDER: tuple[Status, ...] = ("failed", "runs", "waits", "finished", "kept")


class LiveView:
    """Shows a study to a person while it runs.

    Args:
        study: the study, which names the score.
        jobs: how many cells run at once.
        clock: tells seconds.
    """

    def __init__(self, study: Study, jobs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._study, self._jobs, self._clock = study, jobs, clock
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._said = -math.inf
        self._told: set[str] = set()

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def update(self, cells: Sequence[CellProgress]) -> None:
        """Show how far all cells are."""
        for progress in cells:
            if progress.status in ("finished", "failed") and progress.checked.cell.name not in self._told:
                self._told.add(progress.checked.cell.name)
                self._say(_ended(progress, self._study))
        if self._console.is_terminal:
            self._live.update(self._table(cells), refresh=True)
        elif self._clock() - self._said >= SILENCE:
            self._said = self._clock()
            running = [progress for progress in cells if progress.status == "runs"]
            steps = [f"{one.checked.cell.name} at step {one.done}/{one.checked.steps}" for one in running]
            self._say("; ".join([self._summary(cells), *steps]))

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _summary(self, cells: Sequence[CellProgress]) -> str:
        done = sum(progress.status in ("finished", "kept") for progress in cells)
        left = seconds_left(cells, self._jobs)
        said = f"{done} of {len(cells)} cells are finished"
        return said if left is None else f"{said}, {timedelta(seconds=round(left))} left"

    def _table(self, cells: Sequence[CellProgress]) -> Table:
        table = Table(title=self._summary(cells), title_justify="left", box=SIMPLE, pad_edge=False)
        for column in ("row", "seed", "", "step"):
            table.add_column(column, no_wrap=True)
        for mode in MODES:
            table.add_column(f"{self._study.score} {mode}", justify="right", no_wrap=True)
        shown = sorted(cells, key=lambda progress: _ORDER.index(progress.status))[: self._console.height - _AROUND]
        for progress in shown:
            checked = progress.checked
            steps = f"{progress.done}/{checked.steps}" if progress.status == "runs" else ""
            scores = [_score(progress, self._study, mode) for mode in MODES]
            table.add_row(checked.cell.row, str(checked.cell.seed), progress.status, steps, *scores)
        if len(shown) < len(cells):
            table.caption = f"and {len(cells) - len(shown)} more"
        return table


def seconds_left(cells: Sequence[CellProgress], jobs: int) -> float | None:
    """The time that the steps to come will take at the pace so far; None before there is one."""
    steps = sum(max(0, progress.done - progress.begun) for progress in cells if progress.seconds)
    seconds = sum(progress.seconds for progress in cells)
    if not steps:
        return None
    coming = [one.checked.steps - one.done for one in cells if one.status in ("waits", "runs")]
    return max(sum(coming) / min(jobs, max(1, len(coming))), max(coming, default=0)) * seconds / steps


def _ended(progress: CellProgress, study: Study) -> str:
    """How a cell ended, in a sentence."""
    name, took = progress.checked.cell.name, timedelta(seconds=round(progress.seconds))
    if progress.status == "failed":
        log = progress.checked.cell.folder / "log.txt"
        see = f"; see {log}" if progress.seconds else ""
        return f"{name} failed after {took}: {progress.trouble}{see}"
    scores = ", ".join(f"{_score(progress, study, mode)} {mode}" for mode in MODES)
    return f"{name} finished in {took}: {study.score} {scores}"


def _score(progress: CellProgress, study: Study, mode: str) -> str:
    """The score of a finished cell; empty for others."""
    if progress.status not in ("finished", "kept"):
        return ""
    held_out = read_json(progress.checked.cell.folder / "summary.json").get("held_out", {})
    value = held_out.get(mode, {}).get(study.score)
    return "-" if value is None else f"{100 * value:.2f}" if study.unit == "%" else f"{value:.4f}"
