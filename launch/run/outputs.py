"""What a run leaves behind: metrics a line a step, TensorBoard events, weights, a summary and a picture.

runs/NAME/
  recipe.yaml           the resolved recipe, as `thinwire train` reads it
  metrics.jsonl         one line a step
  tensorboard/          the same curves
  weights/              the newest weights, of all stages after the same step (`weights.py`)
  model/                what an export needs beside the weights
  evaluations.jsonl     one line an evaluation
  trace/stage-I.json    what a stage did in the last steps, where that was asked for
  summary.json          everything the closing table says, and more
  loss.png              the loss curve
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
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
    """What a run has to write cannot be written."""


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Inside, the run writes to its folder: a disk that is full or takes nothing is an OutputError."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise OutputError(
            f"{folder} must have room for what the run writes, and its disk does not: {error.strerror}; free some "
            f"space, or name another --output; the newest weights that were saved whole are still there"
        ) from error


class MetricsLog:
    """One line of JSON and a set of TensorBoard points for every step; evaluations likewise.

    A run that goes on from step `first` keeps the lines before it.
    """

    def __init__(self, folder: Path, first: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if not first:
            shutil.rmtree(folder / "tensorboard", ignore_errors=True)  # the curves of an earlier run of the same name
        steps, self._lines = _reopened(folder / "metrics.jsonl", lambda line: line["step"] < first)
        evaluations, self._evaluation_lines = _reopened(
            folder / "evaluations.jsonl", lambda line: 0 < line["step"] <= first
        )
        self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=first or None)
        self.losses: list[tuple[int, float]] = [(line["step"], _with_nan(line["loss"])) for line in steps]
        self.evaluations: list[tuple[int, dict[Compression, Score]]] = [
            (line["step"], {kind: _score(line[kind]) for kind in get_args(Compression)}) for line in evaluations
        ]

    def recipe(self, text: str) -> None:
        """Put the recipe, as YAML, beside the curves."""
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
        """Log an evaluation that followed `step` steps."""
        self.evaluations.append((step, scores))
        values: dict[str, Any] = {mode: score.values() for mode, score in scores.items()}
        self._evaluation_lines.write(json.dumps(_without_nan({"step": step} | values)) + "\n")
        self._evaluation_lines.flush()
        for mode, score in scores.items():
            for name, value in {"loss": score.loss, **score.metrics}.items():
                self._events.add_scalar(f"held-out/{name} compression {mode}", value, step)

    def sync(self) -> None:
        """Wait until the disk has every line."""
        for lines in (self._lines, self._evaluation_lines):
            lines.flush()
            os.fsync(lines.fileno())

    def close(self) -> None:
        """Write out what is buffered."""
        self._lines.close()
        self._evaluation_lines.close()
        self._events.close()


def _reopened(path: Path, stays: Callable[[dict[str, Any]], bool]) -> tuple[list[dict[str, Any]], TextIO]:
    """The lines of a file that stay, and the file opened behind them."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
    kept = [line for line in lines if stays(line)]
    file = path.open("w")
    file.writelines(json.dumps(line) + "\n" for line in kept)
    return kept, file


def _score(values: Mapping[str, Any]) -> Score:
    """The score that a line holds."""
    metrics = {name: _with_nan(value) for name, value in values.items() if name not in ("loss", "num_targets")}
    return Score(_with_nan(values["loss"]), values["num_targets"], metrics)


def _with_nan(value: float | None) -> float:
    """What `_without_nan` made null."""
    return math.nan if value is None else value


def save_recipe(recipe: Recipe) -> None:
    """Write recipe.yaml. Every process does, when the run begins: on its own host a stage must find it to go on.

    Whether the run replaced or continued another is not part of it: it is said anew for every run.
    """
    recipe.folder.mkdir(parents=True, exist_ok=True)
    anew = replace(recipe, checkpoint=replace(recipe.checkpoint, resume="auto"))
    write_whole(recipe.folder / "recipe.yaml", dump(anew))


def save_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json, into the folder of a run or that of a set of its weights."""
    write_whole(folder / "summary.json", json.dumps(_without_nan(summary), indent=2) + "\n")


def save_traces(folder: Path, traces: Sequence[StageTrace]) -> None:
    """Write a file a stage, in place of any trace of an earlier run of the same name."""
    target = folder / "trace"
    shutil.rmtree(target, ignore_errors=True)
    for trace in traces:
        target.mkdir(exist_ok=True)
        (target / f"stage-{trace.stage}.json").write_text(json.dumps(trace.to_json()) + "\n")


def _without_nan(value: Any) -> Any:
    """NaN and infinity as null, because JSON has neither."""
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
    """Draw the loss of every step, in `unit`, and the held-out losses with compression on and off."""
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
