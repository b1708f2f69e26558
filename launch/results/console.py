"""The output of a run: a live line while it trains, tables at the end. Only the process of the last stage prints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from thinwire.compress.stores.space import in_words
from thinwire.errors.words import listed, numbered
from thinwire.launch.results import figures
from thinwire.launch.shared.tables import Table, duration_text, say, show, size_text
from thinwire.pipeline.evaluation import Compression, Score
from thinwire.pipeline.measuring.meters import WAITS
from thinwire.pipeline.training.trainer import StepRecord

if TYPE_CHECKING:
    from thinwire.launch.plan.prepared import Prepared

SILENCE = 30.0
"""Seconds between two lines of a run without a terminal, at most."""
ROOMY = 120
"""The least columns of a terminal for a progress bar."""
SMOKE_NOTE = "a smoke run: every part has worked, but the numbers say nothing about loss or speed"


class ProgressLine:
    """A live line on a terminal. Without a terminal, a plain line now and then, so that logs stay short.

    `tokens` are those of a sample of text, whose speed is given in tokens; 0 for other samples. `clock` gives seconds.
    """

    def __init__(self, total: int, tokens: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._tokens = Console(), tokens
        self._total = total
        self._bar = Progress(
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            *([BarColumn(bar_width=20)] if self._console.width >= ROOMY else []),
            expand=True,  # the text column takes the rest of the width
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=total, left="")
        self._clock, self._started, self._taken, self._said = clock, clock(), 0, -math.inf

    def __enter__(self) -> ProgressLine:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def say(self, line: str) -> None:
        """Print a line above the live one."""
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def step(self, record: StepRecord) -> None:
        """Show a finished step."""
        line = (
            f"loss {record.loss:.3f}  lr {record.lr:.1e}  {self._speed(record)}  "
            f"{record.uncompressed / max(1, record.bytes):.1f}x fewer bytes  {_waiting(record)}"
        )
        self._taken += 1
        done, now = record.step + 1, self._clock()
        # if all steps take as long as those so far
        left = f"{duration_text((self._total - done) * (now - self._started) / self._taken)} left"
        self._bar.update(self._task, completed=done, description=line, left=left)
        every = max(1, self._total // 10)
        if self._bar.disable and (self._said < 0 or done % every == 0 or now - self._said >= SILENCE):
            self._console.print(f"step {done}/{self._total}  {line}  {left}", soft_wrap=True)
            self._said = now

    def _speed(self, record: StepRecord) -> str:
        """Samples or tokens a second; before it the seconds of a step where a sample takes longer than a second."""
        samples = record.samples / record.seconds
        slow = f"{duration_text(record.seconds)} a step" if samples < 1 else ""
        if self._tokens:
            return f"{slow}{'  ' if slow else ''}{self._tokens * samples:,.0f} tokens/s"
        return slow or f"{samples:.1f} samples/s"

    def evaluation(self, done: int, scores: Mapping[Compression, Score]) -> None:
        """Show the held-out scores after `done` steps."""
        self.say(f"held out after step {done}, compression {scores_in_words(scores)}")


def scores_in_words(scores: Mapping[Compression, Score]) -> str:
    """Held-out scores with compression on and off, on one line."""
    said = {
        mode: ", ".join(f"{name} {value:.4f}" for name, value in {"loss": score.loss, **score.metrics}.items())
        for mode, score in scores.items()
    }
    return "; ".join(f"{mode} {values}" for mode, values in said.items())


def tokens_of(prepared: Prepared) -> int:
    """The tokens of a sample, if a model of language is trained; else 0."""
    return prepared.inputs.shape[1] if prepared.data.task.unit == "nats per token" else 0


def _waiting(record: StepRecord) -> str:
    """The shares of a step's time that were waiting, in words."""
    said = {"neighbour": "waiting for stages", "wire": "for the wire", "wait": "for either"}
    shares = {said[name]: record.sections[name] / record.seconds for name in WAITS}
    return ", ".join(f"{share:.0%} {what}" for what, share in shares.items() if share or what != said["wait"])


def show_stores(processes: Mapping[tuple[int, ...], Mapping[str, int]]) -> None:
    """Print the final size of the feedback stores, one line for each process that has some.

    `processes` are the stages of each, with bytes by medium (memory, disk).
    """
    where = {"memory": "in memory", "disk": "on disk"}
    for stages, taken in processes.items():
        parts = [f"{in_words(count)} {where[medium]}" for medium, count in taken.items() if count]
        if parts:
            say(f"{numbered('stage', stages)}: stores of codecs will take {listed(parts)}")


def show_summary(summary: Mapping[str, Any]) -> None:
    """Print the tables at the end: scores, bytes of each channel, time and memory of each stage."""
    scores = figures.scores(summary)
    say(SMOKE_NOTE if summary["smoke"] else "", "" if scores else figures.title_of(summary))
    show([scores] if scores else [])
    say(_apart(summary))
    channels, codecs = _named_once(figures.channels(summary), Console().width)
    show([channels], notes=False)
    say(*codecs)
    between = [figures.shared(summary), figures.replicas(summary), figures.exchange(summary)]
    show([table for table in between if table], notes=False)
    if summary["replicas"] and (counts := summary["samples"]):
        say(f"each of {len(counts)} replicas took {counts[0]} samples")
    show([figures.stages(summary)], notes=False)
    say(
        _devices(summary["stages"]),
        f"weights digest {summary['weights_digest']}",
        f"everything is in {summary['folder']}",
    )


def _named_once(table: Table, width: int) -> tuple[Table, list[str]]:
    """The table of channels; if its codecs make it too wide, with numbers in their place, and a line for each."""
    place = list(table.columns).index("codec")
    codecs = list(dict.fromkeys(str(row[place]) for row in table.rows))
    if sum(table.widths) - table.widths[place] + max(map(len, codecs), default=0) + 2 <= width:
        return table, []
    marks = {codec: f"({number})" for number, codec in enumerate(codecs, 1)}
    rows = [[marks.get(str(cell), cell) for cell in row] for row in table.rows]
    return replace(table, rows=rows), [f" {mark} {codec}" for codec, mark in marks.items()]


def _apart(summary: Mapping[str, Any]) -> str:
    """The time and the bytes of the run outside its training steps, in a sentence."""
    sent = sum(carried["bytes"] for phase, carried in summary["traffic"].items() if phase != "train")
    return (
        f"evaluations: {duration_text(summary['evaluation_seconds'])} and {size_text(sent)}; "
        f"saves: {duration_text(summary['saving_seconds'])}; the whole run: {duration_text(summary['seconds'])}"
    )


def _devices(stages: Sequence[Mapping[str, Any]]) -> str:
    """Where the stages computed, in a sentence."""
    found: dict[str, list[int]] = {}
    for stage in stages:
        found.setdefault(stage["device"], []).append(stage["stage"])
    if len(found) == 1:
        return f"all stages computed on {next(iter(found))}"
    return "; ".join(f"{numbered('stage', here)} computed on {name}" for name, here in found.items())
