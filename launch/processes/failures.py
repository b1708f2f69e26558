"""The message about a failed run: first the stage that failed, then what the others were waiting for.

Every stage process leaves one report in a folder of the launcher. The stage that failed is often not the first to
report: a killed stage leaves no report, and its neighbours see their connections close within milliseconds. So reports
are sorted by what happened, then by time, on the clock of the machine that nobody can set.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.compress import CodecError, StoreError
from thinwire.errors import ThinwireError
from thinwire.errors.words import numbered
from thinwire.launch.results.outputs import OutputError
from thinwire.launch.shared import variables
from thinwire.launch.shared.exit_codes import SIGNALLED, FailedError, StoppedError, ended
from thinwire.models.errors import ModelError
from thinwire.pipeline.errors import CheckpointError, MismatchError, NonFiniteError, OptionsError, PeerError

if TYPE_CHECKING:
    from thinwire.pipeline.processes.placement import Placement

_LASTING = (
    CodecError,
    ModelError,
    OptionsError,
    MismatchError,
    StoreError,
    NonFiniteError,
    CheckpointError,
    OutputError,
)
"""Errors that a restart cannot solve."""

_KINDS = {PeerError: "peer", StoppedError: "saved"}
"""The kind of report by error; every other error is the process's own failure."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Why one process ended.

    Its own failure ("own"), a lost peer ("peer"), a signal that stopped it at once ("stopped"), or a signal to any
    stage after which all wrote a checkpoint ("saved").
    """

    rank: int
    stages: list[int]
    replica: int | None = None
    """Which pipeline; None where there is one only."""
    kind: str
    text: str
    lasting: bool = False
    """Whether the process would fail again in the same way if the run went on from its newest checkpoint."""
    mistake: bool = False
    """Whether it is the user's, found before any work began."""

    def save(self) -> None:
        """Write the report for the launcher. Print it if there is no launcher, or if its folder is gone or full."""
        folder = os.environ.get(variables.FAILURES)
        if folder is not None:
            with suppress(OSError):
                # renamed when complete: the process may be killed at any time, and half a report cannot be read
                written = Path(folder, f"{self.rank}.part")
                written.write_text(json.dumps(asdict(self)))
                written.rename(Path(folder, f"{time.monotonic_ns():020d}-{self.rank}.json"))
                return
        print_to_the_end(self.line())

    def line(self) -> str:
        """The report in words."""
        was = "was" if len(self.stages) < 2 else "were"
        heads = {"own": "failed:", "peer": "lost a peer:", "stopped": f"{was} asked to stop:", "saved": "stopped"}
        return f"{named(self.stages, self.replica)} {heads[self.kind]} {self.text}"


def print_to_the_end(line: str) -> None:
    """Write a line for the user, if there is one, past all buffers: the process may end at once."""
    with suppress(OSError):  # the terminal may be gone too
        os.write(2, f"{line}\n".encode() if line else b"")


def report_of(error: BaseException, rank: int, stages: Sequence[int], replica: int | None = None) -> Report:
    """The report of a process that ends with `error`: a sentence for a `ThinwireError`, else a traceback."""
    text = str(error) if isinstance(error, ThinwireError) else "".join(traceback.format_exception(error)).rstrip()
    kind = next((kind for known, kind in _KINDS.items() if isinstance(error, known)), "own")
    return Report(
        rank=rank,
        stages=list(stages),
        replica=replica,
        kind=kind,
        text=text,
        lasting=isinstance(error, _LASTING),
        mistake=isinstance(error, OptionsError),
    )


def read_reports(folder: Path) -> dict[int, Report]:
    """All reports in a folder, by rank, in the order they were written."""
    reports = (Report(**json.loads(path.read_text())) for path in sorted(folder.glob("*.json")))
    return {report.rank: report for report in reports}


def explain(
    reports: Mapping[int, Report],
    exit_codes: Mapping[int, int],
    where: Placement,
    hung: Iterable[int] = (),
) -> str:
    """The whole failure in words: killed processes, then own failures, then what the others were waiting for.

    If no process failed by itself (a link went down, one stage was asked to stop), processes that hang come first, or
    else the first report. `reports` are in the order they were written. Exit codes are of the processes that failed: a
    negative one is the number of a signal.
    """

    def who(rank: int) -> str:
        stages = where.stages_of(rank)
        said = named(stages, where.replica_of(rank))
        return f"the process of {said}" if len(stages) > 1 else said

    killed = [f"{who(rank)} {ended(code)}" for rank, code in sorted(exit_codes.items()) if rank not in reports]
    hanging = [f"{who(rank)} hung: it did not end when it was asked to" for rank in hung]
    order = {"own": 0, "peer": 1, "saved": 2, "stopped": 3}
    told = sorted(reports.values(), key=lambda report: order[report.kind])
    causes = [report for report in told if report.kind == "own"]
    if not killed and not causes:
        killed, hanging = hanging, []
    if told and not killed and not causes:
        causes = [next(iter(reports.values()))]
    others = [f"  {report.line()}" for report in told if report not in causes]
    return "\n".join(killed + [report.line() for report in _merged(causes)] + others + [f"  {it}" for it in hanging])


def failure(
    reports: Mapping[int, Report], exit_codes: Mapping[int, int], hung: Iterable[int], told: str
) -> ThinwireError:
    """The error that ends a run at its first start: the mistake of the user, if all that failed say the same.

    Else what `explain` makes of the same reports, exit codes and processes that hang.
    """
    unexplained = (exit_codes.keys() - reports.keys()) | {*hung}
    found = {(report.mistake, report.text) for report in reports.values() if report.kind == "own"}
    mistake, text = found.pop() if len(found) == 1 and not unexplained else (False, "")
    return OptionsError(text) if mistake else FailedError(told)


def silences(silent: Mapping[int, str], where: Placement) -> dict[int, Report]:
    """The reports of processes that were killed for their silence, by rank; they leave none."""
    return {
        rank: Report(
            rank=rank, stages=where.stages_of(rank), replica=where.replica_of(rank), kind="own", text=f"it {said}"
        )
        for rank, said in silent.items()
    }


def _merged(reports: Iterable[Report]) -> list[Report]:
    """The reports, with one report for all stages of a pipeline that have the same text."""
    merged: dict[tuple[int | None, str], Report] = {}
    for report in reports:
        before = merged.get((report.replica, report.text))
        merged[report.replica, report.text] = (
            report if before is None else replace(before, stages=sorted(before.stages + report.stages))
        )
    return list(merged.values())


def once(leave: Callable[[Report], None]) -> Callable[[Report], None]:
    """`leave` for the first caller only; later callers wait for it. A failure and a signal may come together."""
    lock, reports = threading.Lock(), list[Report]()

    def first(report: Report) -> None:
        with lock:
            if not reports:
                reports.append(report)
                leave(report)

    return first


def stop_on_signals(
    stopping: Callable[[], None], signals: Iterable[signal.Signals], ends_soon: Callable[[], bool] = lambda: False
) -> None:
    """Call `stopping` on a signal, then end this process at once, even inside a blocking call.

    A signal handler of Python waits until the blocking call returns. A thread that reads the wake-up pipe does not. The
    thread also notices a launcher that was killed, which sends no signal. `stopping` is called before the process ends,
    `ends_soon` on SIGTERM; where that returns True the process goes on, for it ends by itself.
    """
    launcher = os.getppid()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in signals:
        signal.signal(number, lambda *_: None)

    def watch() -> None:
        number: int = signal.SIGTERM  # as if the kernel had sent it, if the launcher is gone
        while os.getppid() == launcher:
            if select.select([reading], [], [], 1.0)[0]:
                number = os.read(reading, 1)[0]
                if number != signal.SIGTERM or os.getppid() != launcher or not ends_soon():
                    break
        try:
            stopping()
        finally:
            os._exit(SIGNALLED + number)

    threading.Thread(target=watch, name="stop-on-signals", daemon=True).start()


def named(stages: Sequence[int], replica: int | None = None) -> str:
    """The stages of a process in words, with the replica if there are several."""
    if not stages:
        return "a process without a stage"
    said = numbered("stage", stages)
    return said if replica is None else f"{said} of replica {replica}"
