"""The log of a run: the metrics of each step, the line that shows how far it is, and its seconds."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from thinwire.compress.stores.marks import run_of
from thinwire.errors.files import as_written
from thinwire.launch.folder.model_files import save_model_files
from thinwire.launch.results.console import ProgressLine, tokens_of
from thinwire.launch.results.metrics import MetricsLog
from thinwire.launch.results.outputs import OutputError, save_recipe, writing
from thinwire.launch.results.summary import Times
from thinwire.launch.run.assembly import Assembly
from thinwire.launch.run.parts.part import RunPart
from thinwire.launch.run.resume import Resumption
from thinwire.models.data.chats import visible
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.evaluation import Compression, Score
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.training.trainer import StepRecord


class Log(RunPart):
    """The log, in the process that reports; the others have no lines. All have the seconds of the run.

    Attributes:
        times: the seconds of the run.
        began: the id of the run since its first step, alike in all processes; one that replaces another has a new one.
        evaluated: the steps after which the last evaluation was; None before the first.
        metered_from: the first step that the meters count; they start at 0 where the cut changes.
    """

    name = "log"

    def __init__(self, assembly: Assembly, runs: Sequence[str], resumption: Resumption) -> None:
        """`runs` are the ids of the run's folders on all hosts."""
        super().__init__(assembly)
        self._runs, self._first, self._same_parts = runs, resumption.first, resumption.same_parts
        self.times, self.began = Times({}), ""
        self.evaluated: int | None = None
        self.metered_from = self._first
        self.lines: MetricsLog | None = None
        self._progress: ProgressLine | None = None

    def begin(self) -> None:
        """Write what a run has before its first step. Lines after its checkpoint go: those steps come again."""
        if not self.began:
            self.began = collectives.everyone(self._where, uuid.uuid4().hex)[0]
        folder = self._recipe.folder
        with writing(folder):
            if self._trainer.reports:
                with as_written(folder / "*.jsonl", OptionsError), writing(folder):
                    tokens = tokens_of(self._prepared)
                    self.lines = MetricsLog(self._recipe, self.began, self._first, self.evaluated or 0, tokens)
            save_recipe(self._recipe)
            if self.lines is not None:
                save_model_files(folder, self._prepared)

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show how far training is, in the process that reports, while the code inside trains."""
        if self.lines is None:
            yield
            return
        with ProgressLine(self._recipe.training.steps, tokens_of(self._prepared)) as self._progress:
            yield

    def say(self, text: str) -> None:
        """Print a line above the live one, in the process that reports."""
        if self._progress is not None:
            self._progress.say(text)

    def after_step(self, done: int, record: StepRecord | None) -> None:
        """Log and show a step."""
        if record is None:
            return
        self.times.seconds["training"] += record.seconds
        if self.lines is not None and self._progress is not None:
            with writing(self._recipe.folder):
                self.lines.step(record)
            if news := self.lines.news():
                self.say(news)
            self._progress.step(record)

    def evaluation(
        self,
        done: int,
        scores: dict[Compression, Score] | None,
        answers: Sequence[tuple[str, Mapping[Compression, str]]],
    ) -> None:
        """Log and show an evaluation after so many steps; every process says that there was one."""
        self.evaluated = done
        if self.lines is None or self._progress is None:
            return
        with writing(self._recipe.folder):
            if scores is not None:
                self.lines.evaluation(done, scores)
            self.lines.answers(done, answers)
        if scores is not None:
            self._progress.evaluation(done, scores)
        for prompt, said in answers:
            told = "".join(f"\n  compression {mode}: {text}" for mode, text in said.items())
            self.say(visible(f"step {done}, {prompt!r}{told}"))

    def check_place(self) -> None:
        """Raise OutputError if somebody moved or removed the run's folder, or put another one in its place."""
        if run_of(self._recipe.folder) not in self._runs:
            raise OutputError(
                f"{self._recipe.folder} must stay in its place while a run writes to it, and was moved or removed; "
                f"move it back, and go on with --resume"
            )

    def sync(self) -> None:
        """Wait until the disk has every line of the log, on any thread."""
        if self.lines is not None:
            self.lines.sync()

    def state_dict(self) -> dict[str, Any]:
        """The seconds so far, the id of the run, and how far its lines go."""
        return {
            "seconds": self.times.state_dict(),
            "began": self.began,
            "evaluated": self.evaluated,
            "metered_from": self.metered_from,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the seconds and the lines of the run."""
        self.times, self.began = Times(state["seconds"]), str(state["began"])
        self.evaluated = None if state["evaluated"] is None else int(state["evaluated"])
        if self._same_parts:
            self.metered_from = int(state["metered_from"])

    def told(self) -> dict[str, Any]:
        """The seconds, and the last training loss."""
        return {
            "metered_from": self.metered_from,
            "seconds": self.times.all,
            **{f"{purpose}_seconds": seconds for purpose, seconds in self.times.seconds.items()},
            "train_loss": None if self.lines is None else self.lines.last_loss,
        }
