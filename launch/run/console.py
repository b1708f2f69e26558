"""The output of a run: a live line while it trains, tables at the end. Only the process of the last stage prints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from thinwire.compress.stores.space import in_words
from thinwire.launch.run.failures import named
from thinwire.launch.shared.tables import size_text, ways_between_replicas
from thinwire.pipeline.evaluation import Compression, Score
from thinwire.pipeline.meters import SECTIONS, WAITS
from thinwire.pipeline.tracing.record import StepRecord

UNEVEN_STAGES = 2.0
"""If the slowest stage computes so many times as long as the fastest, the run suggests a better cut."""
LEAST_COMPUTE_SECONDS = 10.0
"""Seconds. If the slowest stage computed for less, there is no suggestion."""
SILENCE = 30.0
"""Seconds between two lines of a run without a terminal, at most."""
ROOMY = 120
"""The least columns of a terminal for a progress bar."""
SMOKE_NOTE = "a smoke run: every part has worked, but the numbers say nothing about loss or speed"
_UNLIMITED = 10_000
"""Columns of a terminal that is wide enough for any table."""


@dataclass(frozen=True)
class Gain:
    """The speed over one link, in samples a second."""

    link: str
    compressed: float
    uncompressed: float

    @property
    def times(self) -> float:
        """How many times as fast as uncompressed."""
        return self.compressed / self.uncompressed


class ProgressLine:
    """A live line on a terminal. Without a terminal, a plain line now and then, so that logs stay short.

    Args:
        total: the steps of the run.
        stages: those of this process: its steps count the bytes at their boundaries.
        num_stages: those of the pipeline.
        clock: tells seconds.
    """

    def __init__(
        self,
        total: int,
        stages: Sequence[int] = (0,),
        num_stages: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = Console()
        self._total, self._where = total, "" if len(stages) == num_stages else f" at {named(stages)}"
        self._bar = Progress(
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            *([BarColumn(bar_width=20)] if self._console.width >= ROOMY else []),
            expand=True,  # the text column takes the rest of the width
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=total)
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
            f"loss {record.loss:.3f}  {record.samples / record.seconds:.1f} samples/s  "
            f"{record.uncompressed / max(1, record.bytes):.1f}x fewer bytes{self._where}  "
            f"{_waiting(record)}"
        )
        self._taken += 1
        self._bar.update(self._task, completed=record.step + 1, description=line)
        done, now = record.step + 1, self._clock()
        every = max(1, self._total // 10)
        if self._bar.disable and (self._said < 0 or done % every == 0 or now - self._said >= SILENCE):
            self._console.print(f"step {done}/{self._total}  {line}  {self._left(done, now)}", soft_wrap=True)
            self._said = now

    def _left(self, done: int, now: float) -> str:
        """The time that is left, if all steps take as long as those so far."""
        seconds = (self._total - done) * (now - self._started) / self._taken
        return f"{timedelta(seconds=round(seconds))} left"

    def evaluation(self, done: int, scores: Mapping[Compression, Score]) -> None:
        """Show the held-out scores after `done` steps."""
        said = {
            mode: ", ".join(f"{name} {value:.4f}" for name, value in {"loss": score.loss, **score.metrics}.items())
            for mode, score in scores.items()
        }
        parts = [f"{mode} {values}" for mode, values in said.items()]
        self.say(f"held out after step {done}, compression {'; '.join(parts)}")


def _waiting(record: StepRecord) -> str:
    """The shares of a step's time that were waiting, in words."""
    said = {"neighbour": "waiting for stages", "wire": "for the wire", "wait": "for either"}
    shares = {said[name]: record.sections[name] / record.seconds for name in WAITS}
    return ", ".join(f"{share:.0%} {what}" for what, share in shares.items() if share or what != said["wait"])


def show_notes(notes: Sequence[str]) -> None:
    """Print the notes that a run gives before training starts, one line each."""
    for note in notes:
        Console().print(note, highlight=False, soft_wrap=True, markup=False)


def show_stores(processes: Mapping[tuple[int, ...], Mapping[str, int]]) -> None:
    """Print the final size of the feedback stores, one line for each process that has some.

    Args:
        processes: stages of a process -> bytes by medium (memory, disk).
    """
    where = {"memory": "in memory", "disk": "on disk"}
    for stages, taken in processes.items():
        parts = [f"{in_words(count)} {where[medium]}" for medium, count in taken.items() if count]
        if parts:
            here = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
            said = f"{here}: stores for feedback will take {' and '.join(parts)}"
            Console().print(said, highlight=False, soft_wrap=True)


def show_summary(summary: Mapping[str, Any]) -> None:
    """Print the tables at the end: scores, bytes of each channel, time and memory of each stage."""
    console = Console()
    if summary["smoke"]:
        console.print(SMOKE_NOTE, highlight=False, soft_wrap=True)
    _show_scores(console, summary)
    console.print(_apart(summary), highlight=False, soft_wrap=True)
    if summary["loss_scale"]:
        console.print(_scaled(summary), highlight=False, soft_wrap=True)
    _show_channels(console, summary["channels"])
    if summary["replicas"]:
        console.print(_replicas_table(summary["replicas"]))
        console.print(_exchange_table(summary))
        if summary["samples"]:
            console.print(_samples(summary["samples"]), highlight=False, soft_wrap=True)
    console.print(_stages_table(summary))
    console.print(_devices(summary["stages"]), highlight=False, soft_wrap=True, markup=False)
    if note := uneven(summary):
        console.print(note, highlight=False, soft_wrap=True, markup=False)
    console.print(f"weights digest {summary['weights_digest']}", highlight=False, soft_wrap=True)
    console.print(f"everything is in {summary['folder']}", highlight=False, soft_wrap=True)


def show_gains(measured: float, gains: Sequence[Gain], notes: Sequence[str]) -> None:
    """Print the samples a second that were measured and those predicted over slower links, and notes below them.

    Without predictions, nothing is printed.
    """
    if not gains:
        return
    console = Console()
    table = _table("samples/s over slower links between the stages: predicted, not measured")
    for column in ("link", "compressed", "uncompressed", "gain"):
        table.add_column(column, justify="left" if column == "link" else "right", no_wrap=True)
    table.add_row("this machine, measured", f"{measured:.1f}", "", "")
    for gain in gains:
        table.add_row(gain.link, f"{gain.compressed:.1f}", f"{gain.uncompressed:.1f}", f"{gain.times:.2f}x")
    console.print(table)
    for note in filter(None, notes):
        console.print(note, highlight=False, soft_wrap=True, markup=False)


def _show_scores(console: Console, summary: Mapping[str, Any]) -> None:
    """Print the steps and their time, and below them the held-out scores, if there are any."""
    title = f"{summary['name']}: {summary['steps']} steps in {summary['training_seconds']:.0f} s"
    if not summary["held_out"]:
        console.print(title, highlight=False, soft_wrap=True, markup=False)
        return
    table = _table(title)
    table.add_column("")
    columns = [name for name in next(iter(summary["held_out"].values())) if name != "num_targets"]
    for column in columns:
        table.add_column(column, justify="right")
    for mode, score in summary["held_out"].items():
        table.add_row(f"held out, compression {mode}", *(f"{score[column]:.4f}" for column in columns))
    console.print(table)


def _apart(summary: Mapping[str, Any]) -> str:
    """The time and the bytes of the run outside its training steps, in a sentence."""
    sent = sum(carried["bytes"] for phase, carried in summary["traffic"].items() if phase != "train")
    return (
        f"evaluations: {_seconds(summary['evaluation_seconds'])} and {size_text(sent)}; "
        f"saves: {_seconds(summary['saving_seconds'])}; the whole run: {_seconds(summary['seconds'])}"
    )


def _scaled(summary: Mapping[str, Any]) -> str:
    """The loss scale of fp16, and the steps that it cost, in a sentence."""
    scale, steps = summary["loss_scale"], summary["steps"]
    return (
        f"fp16: {scale['skipped']} of {steps} steps were skipped, because a gradient was not finite; the loss scale is "
        f"{scale['factor']:g}"
    )


def _samples(counts: Sequence[int]) -> str:
    """The samples of each replica, in a sentence."""
    if len(set(counts)) == 1:
        return f"each of {len(counts)} replicas took {counts[0]} samples"
    taken = [f"replica {replica} took {count} samples" for replica, count in enumerate(counts)]
    return f"{', '.join(taken)}, of {sum(counts)}"


def uneven(summary: Mapping[str, Any]) -> str:
    """A sentence with advice, if one stage computed much longer than another; else empty."""
    spent = {stage["stage"]: stage["seconds"]["compute"] for stage in summary["stages"]}
    slow, fast = max(spent, key=spent.__getitem__), min(spent, key=spent.__getitem__)
    if spent[slow] < LEAST_COMPUTE_SECONDS or spent[slow] < UNEVEN_STAGES * spent[fast]:
        return ""
    return (
        f"stage {slow} computed for {spent[slow]:.1f} s, stage {fast} for {spent[fast]:.1f} s: thinwire partition "
        f"{Path(summary['folder'], 'recipe.yaml')} measures the layers, and prints a better --pipeline.layers"
    )


def _show_channels(console: Console, channels: Sequence[Mapping[str, Any]]) -> None:
    """Print the bytes of each channel. If the table would be too wide, each codec gets a line below it."""
    codecs = list(dict.fromkeys(channel["codec"] for channel in channels))
    table = _channels_table(channels, {codec: codec for codec in codecs})
    if console.measure(table, options=console.options.update(width=_UNLIMITED)).maximum <= console.width:
        console.print(table)
        return
    marks = {codec: f"({number})" for number, codec in enumerate(codecs, 1)}
    console.print(_channels_table(channels, marks))
    for codec, mark in marks.items():
        console.print(f" {mark} {codec}", highlight=False, soft_wrap=True, markup=False)
    console.print()


def _channels_table(channels: Sequence[Mapping[str, Any]], codecs: Mapping[str, str]) -> Table:
    """The bytes of each channel; `codecs` maps an expression to its text in the table."""
    table = _table("bytes sent while training")
    for column in ("boundary", "channel", "codec"):
        table.add_column(column, no_wrap=True)
    for column in ("sent", "of", "ratio", "bits", "in full"):
        table.add_column(column, justify="right", no_wrap=True)
    for channel in channels:
        low, high = channel["boundary"], channel["boundary"] + 1
        table.add_row(
            f"{low} -> {high}" if channel["channel"] == "activations" else f"{high} -> {low}",
            channel["channel"],
            codecs[channel["codec"]],
            size_text(channel["bytes"]),
            size_text(channel["uncompressed"]),
            f"{channel['uncompressed'] / max(1, channel['bytes']):.2f}x",
            f"{channel['bits_per_element']:.2f}",
            f"{channel['full_share']:.0%}",
        )
    return table


def _replicas_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The bytes that the replicas of each stage sent each other."""
    ways = ways_between_replicas(rows)
    table = _table(f"gradients of weights sent between replicas, {rows[0]['codec']}")
    table.add_column("stage", no_wrap=True)
    table.add_column("way", no_wrap=True)
    for column in ("sent", "of", "ratio", "bits"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row["stage"]),
            ways[row["channel"]],
            size_text(row["bytes"]),
            size_text(row["uncompressed"]),
            f"{row['uncompressed'] / max(1, row['bytes']):.2f}x",
            f"{row['bits_per_element']:.2f}",
        )
    return table


def _exchange_table(summary: Mapping[str, Any]) -> Table:
    """The seconds of the exchange between replicas, and how much the drain of the pipeline hid, if that is known."""
    whose = "" if summary["timed"] == "all" else f" of {summary['timed']}"
    known = any(stage["exchange"]["hidden"] is not None for stage in summary["stages"])
    hid = ", and how much the drain of the pipeline hid"
    table = _table(f"the exchange between replicas{whose}{hid * known}")
    table.add_column("stage", no_wrap=True)
    for column in ("exchange", *(["hidden"] * known), "codecs", "replica", "wire", "other"):
        table.add_column(column, justify="right", no_wrap=True)
    for stage in summary["stages"]:
        # without a step, no section has seconds
        spent = {name: stage["exchange"].get(name, 0.0) for name in (*SECTIONS, "other")}
        share = stage["exchange"]["hidden"]
        total = sum(spent.values())
        times = [f"{_seconds(part)} {part / max(1e-9, total):.0%}" for part in _parts(spent, total)[1:]]
        shares = ["" if share is None else f"{share:.0%}"] * known
        table.add_row(str(stage["stage"]), _seconds(total), *shares, *times)
    return table


def _stages_table(summary: Mapping[str, Any]) -> Table:
    total = max(1e-9, summary["training_seconds"])
    whose = "" if summary["timed"] == "all" else f" of {summary['timed']}"
    table = _table(f"where the {total:.0f} s of training steps{whose} went, and peak memory")
    table.add_column("stage", no_wrap=True)
    on_cards = any(stage["peak_on_card"] is not None for stage in summary["stages"])
    for column in ("compute", "codecs", "neighbour", "wire", "other", "memory", *(["on card"] if on_cards else [])):
        table.add_column(column, justify="right", no_wrap=True)
    for stage in summary["stages"]:
        parts = _parts(stage["seconds"], total)
        whole = sum(parts)  # more than the total where a stage waits in a step while the last stage saves
        times = [f"{_seconds(spent)} {spent / whole:.0%}" for spent in parts]
        peaks = [stage["peak_memory"], stage["peak_on_card"]]
        sizes = [size_text(peak) if peak is not None else "" for peak in peaks[: 1 + on_cards]]
        table.add_row(str(stage["stage"]), *times, *sizes)
    return table


def _devices(stages: Sequence[Mapping[str, Any]]) -> str:
    """Where the stages computed, in a sentence."""
    found: dict[str, list[str]] = {}
    for stage in stages:
        found.setdefault(stage["device"], []).append(str(stage["stage"]))
    if len(found) == 1:
        return f"all stages computed on {next(iter(found))}"
    return "; ".join(
        f"{'stages' if len(here) > 1 else 'stage'} {', '.join(here)} computed on {name}" for name, here in found.items()
    )


def _parts(seconds: Mapping[str, float], total: float) -> list[float]:
    """The seconds of a stage as in the table: compute, codecs, waiting for the neighbour and the wire, rest."""
    shown = [seconds["compute"], seconds["encode"] + seconds["decode"], seconds["neighbour"], seconds["wire"]]
    return [*shown, max(0.0, total - sum(shown))]


def _table(title: str) -> Table:
    """An empty table with narrow columns."""
    return Table(title=title, title_justify="left", box=SIMPLE, collapse_padding=True, pad_edge=False)


def _seconds(spent: float) -> str:
    return f"{spent:.1f} s" if spent < 100 else f"{spent:.0f} s"
