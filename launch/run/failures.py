"""The message about a failed run: first the stage that failed, then what the others were waiting for.

Every stage process leaves one report in a folder of the launcher. The stage that failed is often not the first to
report: a killed stage leaves no report, and its neighbours see their connections close within milliseconds. So reports
are sorted by what happened, then by their number. The number is their order; clocks may differ.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

from thinwire.compress import CodecError, StoreError
from thinwire.errors import ThinwireError
from thinwire.launch.run.parent import STOPPED
from thinwire.launch.shared.exit_codes import ended
from thinwire.models.errors import ModelError
from thinwire.pipeline.errors import CheckpointError, MismatchError, NonFiniteError, OptionsError, PeerError

FOLDER_VARIABLE = "THINWIRE_FAILURES"

_LASTING = (CodecError, StoreError, ModelError, OptionsError, MismatchError, NonFiniteError, CheckpointError)
"""Errors that a restart cannot solve."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Why one process ended: its own failure ("own"), a lost peer ("peer"), or a signal to stop ("stopped")."""

    rank: int
    stages: list[int]
    kind: str
    text: str
    lasting: bool = False
    """Whether the process would fail again in the same way if the run went on from its newest checkpoint."""

    def save(self) -> None:
        """Write the report for the launcher. Without a launcher, print it."""
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder is None:
            os.write(2, f"{self.line()}\n".encode())
        else:
            # renamed when complete: the process may be killed at any time, and half a report cannot be read
            written = Path(folder, f"{self.rank}.part")
            written.write_text(json.dumps(asdict(self)))
            written.rename(_next_place(Path(folder)))

    def line(self) -> str:
        """The report in words."""
        head = {"own": "failed", "peer": "lost a peer", "stopped": "was told to stop"}[self.kind]
        return f"{_name(self.stages)} {head}: {self.text}"


def _next_place(folder: Path) -> Path:
    """The file of the next report, still empty."""
    for place in (folder / f"{number:06d}.json" for number in count()):
        with suppress(FileExistsError):
            place.touch(exist_ok=False)
            return place
    raise AssertionError("numbers do not end")


def report_of(error: BaseException, rank: int, stages: Sequence[int]) -> Report:
    """The report of a process that ends with `error`: a sentence for a `ThinwireError`, else a traceback."""
    text = str(error) if isinstance(error, ThinwireError) else "".join(traceback.format_exception(error)).rstrip()
    kind = "peer" if isinstance(error, PeerError) else "own"
    return Report(rank=rank, stages=list(stages), kind=kind, text=text, lasting=isinstance(error, _LASTING))


def read_reports(folder: Path) -> dict[int, Report]:
    """All reports in a folder, by rank, in the order they were written."""
    texts = (path.read_text() for path in sorted(folder.glob("*.json")))
    reports = (Report(**json.loads(text)) for text in texts if text)
    return {report.rank: report for report in reports}


def tell(
    reports: Mapping[int, Report],
    exit_codes: Mapping[int, int | None],
    stages_of: Callable[[int], list[int]],
    hung: Iterable[int] = (),
) -> str:
    """The whole failure in words: killed processes, then own failures, then what the others were waiting for.

    If no process failed by itself (a link went down, one stage was told to stop), processes that hang come first, or
    else the first report.

    Args:
        reports: reports by rank, in the order they were written.
        exit_codes: exit codes of the processes that failed: negative is the number of a signal, None is unknown.
        stages_of: the stages of a rank.
        hung: the ranks that did not end after SIGTERM.
    """
    silent = [rank for rank in sorted(exit_codes) if rank not in reports]
    killed = [f"{_name(stages_of(rank))} {_ended(exit_codes[rank])}" for rank in silent]
    hanging = [f"{_name(stages_of(rank))} hung: it did not end when it was told to" for rank in hung]
    order = {"own": 0, "peer": 1, "stopped": 2}
    told = sorted(reports.values(), key=lambda report: order[report.kind])
    causes = [report for report in told if report.kind == "own"]
    if not killed and not causes:
        killed, hanging = hanging, []
    if told and not killed and not causes:
        causes = [next(iter(reports.values()))]
    others = [f"  {report.line()}" for report in told if report not in causes]
    return "\n".join(killed + [report.line() for report in _merged(causes)] + others + [f"  {it}" for it in hanging])


def _merged(reports: Iterable[Report]) -> list[Report]:
    """The reports, with one report for all stages that have the same text."""
    merged: dict[str, Report] = {}
    for report in reports:
        before = merged.get(report.text)
        merged[report.text] = (
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


def stop_on_signals(stopping: Callable[[], None], signals: Iterable[signal.Signals]) -> None:
    """Call `stopping` on a signal, then end this process at once, even inside a blocking call.

    A signal handler of Python waits until the blocking call returns. A thread that reads the wake-up pipe does not. The
    thread also notices a launcher that was killed, which sends no signal.
    """
    launcher = os.getppid()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in signals:
        signal.signal(number, lambda *_: None)

    def watch() -> None:
        while os.getppid() == launcher and not select.select([reading], [], [], 1.0)[0]:
            pass
        try:
            stopping()
        finally:
            os._exit(STOPPED)

    threading.Thread(target=watch, name="stop-on-signals", daemon=True).start()


def _ended(exit_code: int | None) -> str:
    return "ended without a report, as a killed process does" if exit_code is None else ended(exit_code)


def _name(stages: Sequence[int]) -> str:
    if not stages:
        return "a process without a stage"
    return f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"
