"""Runs cells, several at once, each in its own process, until all have ended or a signal comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinwire.errors.files import open_regular
from thinwire.launch.run import parent
from thinwire.launch.shared.environment import environment
from thinwire.launch.study.check import Checked
from thinwire.launch.study.progress import (
    Found,
    begin,
    drop_checkpoints,
    is_finished,
    last_line,
    steps_done,
    weights_digest,
)

Status = Literal["waits", "runs", "finished", "failed", "kept"]
Runner = Literal["simulate", "train"]

GRACE = 10.0
"""Seconds that cells get to end after SIGTERM."""
_POLL = 0.5


@dataclass
class CellProgress:
    """How far one cell is."""

    checked: Checked
    found: Found
    status: Status
    command: Runner = "simulate"
    """Whether it is one process, or one for each stage."""
    begun: int = 0
    """Steps that were done before this study went on."""
    done: int = 0
    """Steps that are done."""
    seconds: float = 0.0
    """How long its process has run."""
    trouble: str = ""
    """Why it failed, in the words of its process."""


class _Job:
    """A cell's process."""

    def __init__(self, progress: CellProgress) -> None:
        self.progress = progress
        checked = progress.checked
        folder = checked.cell.folder
        resume = "auto" if progress.found.state == "goes on" else "never"
        asked = [progress.command, *checked.cell.starting(str(checked.cell.base))]
        base = weights_digest(checked.cell.base) if checked.cell.base else None
        begin(checked, {**environment("thinwire study"), "command": asked, "base": base})
        arguments = [*asked, "--checkpoint.resume", resume]
        mode = os.O_APPEND if resume == "auto" else os.O_TRUNC
        with os.fdopen(open_regular(folder / "log.txt", os.O_WRONLY | os.O_CREAT | mode), "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "thinwire.launch.study.cell_process", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, parent.VARIABLE: str(os.getpid()), "OMP_NUM_THREADS": str(checked.threads)},
                start_new_session=True,  # so that only the study gets Ctrl-C
            )
        self._started = time.monotonic()
        self._before = _stamp(folder)
        progress.status = "runs"
        progress.done = progress.begun = steps_done(folder) if resume == "auto" else 0

    def look(self) -> bool:
        """Bring the progress up to date; whether the process has ended."""
        progress, folder = self.progress, self.progress.checked.cell.folder
        code = self.process.poll()
        progress.seconds = time.monotonic() - self._started
        if _stamp(folder) != self._before:  # else the log is that of the attempt before
            progress.done = steps_done(folder)
            progress.begun = min(progress.begun, progress.done)  # the steps behind the checkpoint are taken again
        if code is None:
            return False
        if code == 0 and is_finished(folder):
            progress.status = "finished"
            drop_checkpoints(folder)
        else:
            progress.status, progress.trouble = "failed", last_line(folder / "log.txt") or f"exited with status {code}"
        return True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the cell's processes."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


def _stamp(folder: Path) -> tuple[int, int] | None:
    """When the log of a cell was written, and its size; None where there is none."""
    try:
        found = (folder / "metrics.jsonl").stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def run_cells(
    cells: Sequence[CellProgress],
    jobs: int,
    tell: Callable[[Sequence[CellProgress]], None],
    came: Sequence[signal.Signals],
) -> None:
    """Run the cells that wait, `jobs` at once.

    Args:
        cells: all cells; brought up to date.
        jobs: how many run at once.
        tell: called with all cells, again and again.
        came: the signals that this process has got; the first one stops the cells.
    """
    waiting = [progress for progress in cells if progress.status == "waits"]
    running: list[_Job] = []
    try:
        while (waiting or running) and not came:
            for ready in _ready(waiting, cells)[: jobs - len(running)]:
                waiting.remove(ready)
                try:
                    running.append(_Job(ready))
                except OSError as error:  # a full disk, or a file where a folder should be
                    place = error.filename or ready.checked.cell.folder
                    ready.status, ready.trouble = "failed", f"{place} cannot be written: {error.strerror}"
            running = [job for job in running if not job.look()]
            tell(cells)
            if running:
                time.sleep(_POLL)
    finally:
        _stop(running)


def _ready(waiting: list[CellProgress], cells: Sequence[CellProgress]) -> list[CellProgress]:
    """The cells that can start. Those that start with the weights of a failed cell fail; `waiting` loses them."""
    status: dict[Path | None, Status] = {one.checked.cell.folder: one.status for one in cells}
    for one in [one for one in waiting if status.get(one.checked.cell.base) == "failed"]:
        one.status, one.trouble = "failed", f"it starts with the weights of {one.checked.cell.base}, which failed"
        waiting.remove(one)
    return [one for one in waiting if status.get(one.checked.cell.base, "kept") in ("finished", "kept")]


def _stop(running: Sequence[_Job]) -> None:
    """End the cells that still run."""
    for job in running:
        job.signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and any(job.process.poll() is None for job in running):
        time.sleep(_POLL / 10)
    for job in running:
        job.signal(signal.SIGKILL)
        job.process.wait()
