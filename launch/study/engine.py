"""Runs cells, several at once, each in its own process, until all have ended or a signal comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from thinwire.compress.stores.durable import write_durably
from thinwire.errors.files import open_regular
from thinwire.launch.comparison.runs import MODES, factor_of, unit_of
from thinwire.launch.folder.policy import clear, held
from thinwire.launch.shared import variables
from thinwire.launch.shared.environment import environment
from thinwire.launch.shared.exit_codes import ended, signal_group
from thinwire.launch.shared.scratch import no_room
from thinwire.launch.shared.strict_json import dumps
from thinwire.launch.shared.tables import duration_text
from thinwire.launch.study.cells import Cell, Origin, State, is_finished, last_line, read_json, weights_digest
from thinwire.launch.study.definition import Study
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.saving.checkpoint_folder import remove_checkpoints

Status = Literal["waits", "runs", "finished", "failed"]

GRACE = 10.0
"""Seconds that cells get to end after SIGTERM."""
SILENCE = 30.0
"""Seconds after which a study prints how far it is."""
_POLL = 0.5
_ROOM = 1 << 14
"""Bytes that the last words of a cell may take."""


@dataclass
class Job:
    """A cell of a study that runs: what its folder holds at the start, and how far it is now."""

    cell: Cell
    origin: Origin
    steps: int
    """Optimizer steps of the whole run."""
    threads: int
    state: State
    changed: Sequence[str] = ()
    """What has changed in its origin, if it begins anew."""
    status: Status = "waits"
    seconds: float = 0.0
    """How long its process ran; 0 before it has ended."""
    trouble: str = ""
    """Why it failed, in the words of its process."""
    process: subprocess.Popen[bytes] | None = None
    started: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        """Start its process. OSError if its folder cannot be written, OptionsError if a run still writes there."""
        cell = self.cell
        asked = ["simulate", *cell.starting(str(cell.base))]
        cell.folder.mkdir(parents=True, exist_ok=True)
        made = {"row": cell.row, "seed": cell.seed, "origin": self.origin, **environment("thinwire study")}
        made |= {"command": asked, "given": cell.given, "base": weights_digest(cell.base)}
        with held(cell.folder):  # what a cell of a killed study still writes is not of these options
            if self.state != "goes on":
                clear(cell.folder)
            write_durably(cell.folder / "cell.json", f"{dumps(made, indent=2)}\n".encode())
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if self.state == "goes on" else os.O_TRUNC)
        with os.fdopen(open_regular(cell.folder / "log.txt", flags), "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "thinwire.launch.processes.parent", *asked],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, variables.LAUNCHER: str(os.getpid()), "OMP_NUM_THREADS": str(self.threads)},
                start_new_session=True,  # so that only the study gets Ctrl-C
            )
        self.started, self.status = time.monotonic(), "runs"

    def look(self) -> None:
        """Note how its process has ended, if it has."""
        assert self.process is not None, "it runs"
        if (code := self.process.poll()) is None:
            return
        folder, self.seconds = self.cell.folder, time.monotonic() - self.started
        if code == 0 and is_finished(folder):
            self.status = "finished"
            remove_checkpoints(folder / "checkpoints")
        else:
            # who was killed said nothing of it, and on a full disk nobody can
            said = [] if code < 0 else [last_line(folder / "log.txt")]
            if code >= 0 and (error := no_room(folder, _ROOM)):
                said.append(f"{folder} cannot be written: {error.strerror}")
            self.status, self.trouble = "failed", "; ".join(filter(None, said)) or ended(code)

    def ended(self, study: Study) -> str:
        """How it ended, in a sentence."""
        folder, took = self.cell.folder, duration_text(self.seconds)
        if self.status == "failed":
            see = f"; see {folder / 'log.txt'}" if self.process else ""
            return f"{self.cell.name} failed after {took}: {self.trouble}{see}"
        held_out = read_json(folder / "summary.json").get("held_out", {})
        scores = {mode: held_out.get(mode, {}).get(study.score) for mode in MODES}
        digits, factor = 2 if unit_of(study.score) else 4, factor_of(study.score)
        said = (f"{'-' if one is None else f'{factor * one:.{digits}f}'} {mode}" for mode, one in scores.items())
        return f"{self.cell.name} finished in {took}: {study.score} {', '.join(said)}"


def run_jobs(
    jobs: Sequence[Job],
    at_once: int,
    study: Study,
    came: Sequence[signal.Signals],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run the cells that wait, and print how each has ended, and now and then how far the others are.

    All jobs are brought up to date. The first of the signals that `came` stops them.
    """
    coming = [job for job in jobs if job.status == "waits"]
    printed = clock() - SILENCE
    try:
        while coming and not came:
            running = [job for job in coming if job.status == "runs"]
            for job in ready(coming, jobs)[: at_once - len(running)]:
                try:
                    job.start()
                except OptionsError as error:
                    job.status, job.trouble = "failed", str(error)
                except OSError as error:  # a full disk, or a file where a folder should be
                    place = error.filename or job.cell.folder
                    job.status, job.trouble = "failed", f"{place} cannot be written: {error.strerror}"
            for job in coming:
                if job.status == "runs":
                    job.look()
                if job.status in ("finished", "failed"):
                    print(job.ended(study), flush=True)
            coming = [job for job in coming if job.status in ("waits", "runs")]
            if coming and clock() - printed >= SILENCE:
                print(progress(jobs), flush=True)
                printed = clock()
            if any(job.status == "runs" for job in coming):
                time.sleep(_POLL)
    finally:
        _stop([job.process for job in jobs if job.status == "runs" and job.process])


def ready(coming: Sequence[Job], jobs: Sequence[Job]) -> list[Job]:
    """The cells that can start. Those that start with the weights of a failed cell fail."""
    status: dict[Path | None, Status] = {job.cell.folder: job.status for job in jobs}
    waiting = [job for job in coming if job.status == "waits"]
    for job in waiting:
        if status.get(job.cell.base) == "failed":
            job.status, job.trouble = "failed", f"it starts with the weights of {job.cell.base}, which failed"
    return [job for job in waiting if status.get(job.cell.base, "finished") == "finished"]


def progress(jobs: Sequence[Job]) -> str:
    """How far a study is: the number of finished cells, and the last line of each running one."""
    done = sum(job.status == "finished" for job in jobs)
    running = [job for job in jobs if job.status == "runs"]
    lines = (f"{job.cell.name}: {last_line(job.cell.folder / 'log.txt')}" for job in running)
    return "; ".join([f"{done} of {len(jobs)} cells are finished", *lines])


def _stop(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes of the cells that still run."""
    for process in running:
        signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and any(process.poll() is None for process in running):
        time.sleep(_POLL / 10)
    for process in running:
        signal_group(process, signal.SIGKILL)
        process.wait()
