"""The files that a run writes: metrics of each step, TensorBoard events, weights, a summary and a picture.

runs/NAME/
  recipe.yaml           the resolved recipe, as `thinwire train` reads it
  metrics.jsonl         one line for each step
  tensorboard/          the same curves
  weights/              the newest weights, of all stages after the same step (`weights.py`)
  model/                files that an export needs beside the weights
  evaluations.jsonl     one line for each evaluation
  trace/stage-I.json    the last steps of a stage, if the recipe asks for a trace
  summary.json          the numbers of the tables at the end, and more
  loss.png              the loss curve
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO, get_args

from torch.utils.tensorboard import SummaryWriter

from thinwire.launch.run.recipe import Recipe, dump
from thinwire.launch.run.weights import write_whole
from thinwire.launch.shared.exit_codes import FailedError
from thinwire.pipeline.evaluation import Compression, Score
from thinwire.pipeline.tracing.tracer import StageTrace
from thinwire.pipeline.trainer import StepRecord


class OutputError(FailedError):
    """A file of a run cannot be written."""


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}
"""Errors of a disk that is full, over its quota, or read-only."""


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Around code that writes to the folder of a run: if the disk is full or read-only, raise OutputError."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise OutputError(
            f"{folder} must have room for the files of the run, but its disk does not: {error.strerror}; free some "
            f"space, or name another --output; the newest whole set of weights is still there"
        ) from error


class MetricsLog:
    """The log of a run: one line of JSON and some TensorBoard points for every step and every evaluation.

    A run that goes on from step `first` keeps the lines of the steps before it.
    """

    def __init__(self, folder: Path, first: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if not first:
            shutil.rmtree(folder / "tensorboard", ignore_errors=True)  # the curves of an earlier run of the same name
        steps, self._lines = _reopened(folder / "metrics.jsonl", lambda line: line["step"] < first)
        evaluations, self._evaluation_lines = _reopened(
            folder / "evaluations.jsonl", lambda line: 0 < line["step"] <= first
        )
        self._hook = threading.excepthook
        threading.excepthook = self._unless_tensorboard
        self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=first or None)
        self.losses: list[tuple[int, float]] = [(line["step"], _with_nan(line["loss"])) for line in steps]
        self.evaluations: list[tuple[int, dict[Compression, Score]]] = [
            (line["step"], {kind: _score(line[kind]) for kind in get_args(Compression)}) for line in evaluations
        ]

    def recipe(self, text: str) -> None:
        """Add the recipe to TensorBoard, as YAML."""
        self._events.add_text("recipe", f"```yaml\n{text}```")

    def step(self, record: StepRecord) -> None:
        """Log a training step."""
        values = asdict(record)
        self._lines.write(json.dumps(_without_nan(values)) + "\n")
        self._lines.flush()
        for name in ("loss", "lr", "grad_norm"):
            if values[name] is not None:
                self._events.add_scalar(f"train/{name}", values[name], record.step)
        self._events.add_scalar("train/samples_per_second", record.samples / record.seconds, record.step)
        self._events.add_scalar("train/seconds", record.seconds, record.step)
        self._events.add_scalar("bytes/frames", record.bytes, record.step)
        self._events.add_scalar("bytes/tensors in them", record.uncompressed, record.step)
        for name, seconds in record.sections.items():
            self._events.add_scalar(f"share/{name}", seconds / record.seconds, record.step)
            self._events.add_scalar(f"seconds/{name}", seconds, record.step)
        if record.loss is not None:
            self.losses.append((record.step, record.loss))

    def evaluation(self, step: int, scores: dict[Compression, Score]) -> None:
        """Log an evaluation after `step` steps."""
        self.evaluations.append((step, scores))
        values: dict[str, Any] = {mode: score.values() for mode, score in scores.items()}
        self._evaluation_lines.write(json.dumps(_without_nan({"step": step} | values)) + "\n")
        self._evaluation_lines.flush()
        for mode, score in scores.items():
            for name, value in {"loss": score.loss, **score.metrics}.items():
                self._events.add_scalar(f"held-out/{name} compression {mode}", value, step)

    def sync(self) -> None:
        """Wait until every line is on the disk."""
        for lines in (self._lines, self._evaluation_lines):
            lines.flush()
            os.fsync(lines.fileno())

    def close(self) -> None:
        """Write buffered lines and points, and close the files."""
        self._lines.close()
        self._evaluation_lines.close()
        self._events.flush()  # unlike close, it raises an error of the thread that writes
        self._events.close()
        threading.excepthook = self._hook

    def _unless_tensorboard(self, failed: threading.ExceptHookArgs) -> None:
        """Print the traceback of a thread, but not of TensorBoard's: the next point that is logged raises its error."""
        if not type(failed.thread).__module__.startswith("tensorboard."):
            self._hook(failed)


def _reopened(path: Path, stays: Callable[[dict[str, Any]], bool]) -> tuple[list[dict[str, Any]], TextIO]:
    """Keep some lines of a file; the kept lines, and the file, open for more lines after them."""
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [values for line in lines if (values := _values(line)) is not None and stays(values)]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))  # a kill from here on loses no line
    return kept, path.open("a")


def _values(line: str) -> dict[str, Any] | None:
    """The values of a line; None if only a part of it was written."""
    try:
        return dict(json.loads(line))
    except ValueError:
        return None


def _score(values: Mapping[str, Any]) -> Score:
    """The score in a line of evaluations.jsonl."""
    metrics = {name: _with_nan(value) for name, value in values.items() if name not in ("loss", "num_targets")}
    return Score(_with_nan(values["loss"]), values["num_targets"], metrics)


def _with_nan(value: float | None) -> float:
    """The number, or NaN for the null that `_without_nan` wrote."""
    return math.nan if value is None else value


def save_recipe(recipe: Recipe) -> None:
    """Write recipe.yaml. Every process does this when the run begins, because each host needs the file to go on.

    The file does not hold `checkpoint.resume`: each run needs its own decision to replace another run or to go on.
    """
    recipe.folder.mkdir(parents=True, exist_ok=True)
    anew = replace(recipe, checkpoint=replace(recipe.checkpoint, resume="auto"))
    write_whole(recipe.folder / "recipe.yaml", dump(anew))


def save_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json to the folder of a run, or to the folder of a set of weights."""
    write_whole(folder / "summary.json", json.dumps(_without_nan(summary), indent=2) + "\n")


def save_traces(folder: Path, traces: Sequence[StageTrace]) -> None:
    """Write one file for each stage. They replace the trace of an earlier run in the same folder."""
    target = folder / "trace"
    shutil.rmtree(target, ignore_errors=True)
    for trace in traces:
        target.mkdir(exist_ok=True)
        (target / f"stage-{trace.stage}.json").write_text(json.dumps(trace.to_json()) + "\n")


def _without_nan(value: Any) -> Any:
    """The value with null for NaN and infinity, because JSON has neither."""
    if isinstance(value, Mapping):
        return {name: _without_nan(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_picture(
    path: Path,
    title: str,
    unit: str,
    losses: Sequence[tuple[int, float]],
    evaluations: Sequence[tuple[int, dict[Compression, Score]]],
) -> None:
    """Draw the training loss of every step, and the held-out losses with compression on and off, as a picture.

    Args:
        path: the file to write.
        title: the title of the picture.
        unit: the unit of the loss.
        losses: (step, training loss).
        evaluations: (steps done, scores by compression).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="optimizer step", ylabel=f"loss ({unit})", title=title)
    if losses:
        axes.plot(*zip(*losses, strict=True), linewidth=0.8, label="training")
    for mode, marker in (("on", "o"), ("off", "x")):
        points = [(step, scores[mode].loss) for step, scores in evaluations]  # type: ignore[index]
        if points:
            axes.plot(*zip(*points, strict=True), marker, label=f"held out, compression {mode}: {points[-1][1]:.3f}")
    axes.grid(alpha=0.3)
    if losses or evaluations:
        axes.legend()
    figure.savefig(path, dpi=120)
