"""The files that a run writes: metrics of each step, weights, a summary and a picture.

runs/NAME/
  written-by-thinwire.txt   the mark of the run; a run replaces and removes nothing without one (`marks.py`)
  recipe.yaml           the resolved recipe, as `thinwire train` reads it
  metrics.jsonl         one line for each step (`log_file.py`)
  tensorboard/          the same as curves, if the recipe asks for them (`hooks.py`)
  weights/              a checkpoint of the newest weights (`launch/folder/weights.py`)
  best/                 one of the weights with the best held-out score, if the recipe asks for it
  model/                files that an export needs beside the weights
  evaluations.jsonl     one line for each evaluation
  answers.jsonl         one line for each prompt of each evaluation, if the recipe has prompts
  exchanges.jsonl       one line for each step in which replicas exchanged
  summary.json          the numbers of the tables at the end, and more
  loss.png              the loss curve
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.compress.stores.durable import write_durably
from thinwire.launch.recipe.recipe import Recipe, dump
from thinwire.launch.results.log_file import FULL
from thinwire.launch.shared.exit_codes import FailedError
from thinwire.launch.shared.strict_json import dumps
from thinwire.pipeline.evaluation import Compression, Score


class OutputError(FailedError):
    """A file of a run cannot be written."""


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
            f"space, or name another --output; what was saved before is still there"
        ) from error


def save_recipe(recipe: Recipe) -> None:
    """Write recipe.yaml. Every process does this when the run begins, because each host needs the file to go on.

    The file does not hold `checkpoint.resume`: each run needs its own decision to replace another run or to go on.
    """
    anew = replace(recipe, checkpoint=replace(recipe.checkpoint, resume="auto"))
    write_durably(recipe.folder / "recipe.yaml", dump(anew).encode())


def save_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json to the folder of a run."""
    write_durably(folder / "summary.json", f"{dumps(summary, indent=2)}\n".encode())


def save_picture(
    path: Path,
    title: str,
    unit: str,
    losses: Sequence[tuple[int, float]],
    evaluations: Sequence[tuple[int, dict[Compression, Score]]],
) -> None:
    """Draw the training loss of every step, and the held-out losses with compression on and off, as a picture.

    `losses` are (step, training loss), `evaluations` (steps done, scores by compression).
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
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120)
    write_durably(path, drawn.getvalue())
