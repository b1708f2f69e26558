"""What a study says while its cells run: a line for each that has ended, and one now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from thinwire.launch.shared.tables import duration_text
from thinwire.launch.study.definition import MODES, Study
from thinwire.launch.study.engine import CellProgress
from thinwire.launch.study.progress import read_json

SILENCE = 30.0
"""Seconds after which a study says how far it is."""


class Lines:
    """Prints how far a study is.

    Args:
        study: the study, which names the score.
        jobs: how many cells run at once.
        clock: gives the time in seconds.
    """

    def __init__(self, study: Study, jobs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._study, self._jobs, self._clock = study, jobs, clock
        self._said = -math.inf
        self._told: set[str] = set()

    def __call__(self, cells: Sequence[CellProgress]) -> None:
        """Print what there is to say of all cells."""
        for progress in cells:
            if progress.status in ("finished", "failed") and progress.checked.cell.name not in self._told:
                self._told.add(progress.checked.cell.name)
                print(_ended(progress, self._study), flush=True)
        if self._clock() - self._said < SILENCE:
            return
        self._said = self._clock()
        done = sum(progress.status in ("finished", "kept") for progress in cells)
        left = seconds_left(cells, self._jobs)
        said = f"{done} of {len(cells)} cells are finished"
        running = [progress for progress in cells if progress.status == "runs"]
        steps = [f"{one.checked.cell.name} at step {one.done}/{one.checked.steps}" for one in running]
        print("; ".join([said if left is None else f"{said}, {duration_text(left)} left", *steps]), flush=True)


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
    folder, name = progress.checked.cell.folder, progress.checked.cell.name
    took = duration_text(progress.seconds)
    if progress.status == "failed":
        see = f"; see {folder / 'log.txt'}" if progress.seconds else ""
        return f"{name} failed after {took}: {progress.trouble}{see}"
    held_out = read_json(folder / "summary.json").get("held_out", {})
    scores = {mode: held_out.get(mode, {}).get(study.score) for mode in MODES}
    factor, digits = (100, 2) if study.unit == "%" else (1, 4)
    said = (f"{'-' if one is None else f'{factor * one:.{digits}f}'} {mode}" for mode, one in scores.items())
    return f"{name} finished in {took}: {study.score} {', '.join(said)}"
