"""The cells of a study: one run for each row and seed.

FOLDER/cells/ROW/seed-N/    the folder of a run, like any other
  cell.json                 what it was made from: fields of the recipe, data, code, machine
  log.txt                   what the run printed
FOLDER/again/ROW/seed-N/    the same cell, trained a second time the other way: as processes, or as one
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.launch.study.definition import Options, Row, Scale, Study

CHECKPOINTS = ("--checkpoint.every", "1 epoch", "--checkpoint.keep", "1")
"""When a cell writes a checkpoint, if the study does not say it."""


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    row: str
    seed: int
    folder: Path
    arguments: tuple[str, ...]
    """The arguments of `thinwire simulate` or `thinwire train`."""
    asked: tuple[str, ...]
    """The arguments that the study gives; they come first."""
    base: Path | None = None
    """The folder of the cell whose last weights are the first of this one."""
    again: bool = False
    """Whether another folder has the same cell, trained the other way."""

    @property
    def name(self) -> str:
        """Its name in tables and messages."""
        return f"{self.row}, seed {self.seed}{', again' if self.again else ''}"

    def starting(self, weights: str) -> tuple[str, ...]:
        """The arguments, with these first weights if the cell starts with those of another."""
        return (*self.arguments, "--model.weights", weights) if self.base else self.arguments


def rows_of(study: Study, scale: Scale) -> dict[str, Row]:
    """The rows that a scale runs, in the order of the study."""
    return {name: row for name, row in study.all_rows.items() if not scale.rows or name in scale.rows}


def cells_of(study: Study, scale: Scale, folder: Path, given: Sequence[str] = ()) -> list[Cell]:
    """All cells, seed by seed, so that every row has a result early.

    Args:
        study: the study.
        scale: its scale.
        folder: the folder of the cells of this scale.
        given: options of the command line, for every cell. They override the study's and the scale's, but not those of
            a row, which make it what it is.
    """
    recipe = scale.recipe or study.recipe
    cells = []
    for seed in scale.seeds or study.seeds:
        for row, content in rows_of(study, scale).items():
            own = own_options(study, scale, row)
            asked = (recipe, *CHECKPOINTS, *_arguments({**study.options, **scale.options, **own}))
            again = _arguments(own) if given else ()  # once more, so that they hold whatever was typed
            place, named = _place(folder, row, seed), f"{_slug(row)}-seed-{seed}"
            last = ["--training.seed", str(seed), "--name", named, "--output", str(place)]
            base = _place(folder, content.starts_with, seed) if content.starts_with else None
            cells.append(Cell(row, seed, place, (*asked, *given, *again, *last), asked, base))
    return cells


def second(cell: Cell, folder: Path) -> Cell:
    """The same cell with a place of its own in the folder of the study, to be trained the other way."""
    place = folder / "again" / cell.folder.relative_to(folder / "cells")
    return replace(cell, folder=place, arguments=(*cell.arguments, "--output", str(place)), again=True)


def own_options(study: Study, scale: Scale, row: str) -> Options:
    """The options that a row sets itself, at a scale."""
    return {**study.all_rows[row].options, **scale.row_options.get(row, {})}


def _place(folder: Path, row: str, seed: int) -> Path:
    """The folder of a cell."""
    return folder / "cells" / _slug(row) / f"seed-{seed}"


def _slug(row: str) -> str:
    """A folder's name for a row. A few characters of a hash distinguish rows whose names differ only in signs."""
    plain = re.sub(r"[^a-z0-9.]+", "-", row.lower()).strip("-.")[:60]
    digest = hashlib.sha256(row.encode()).hexdigest()[:4]
    return plain if re.sub(r"[ ,]+", "-", row.lower()) == plain else f"{plain}-{digest}"


def _arguments(options: Mapping[str, Any]) -> list[str]:
    """Options as a command line has them."""
    return [part for name, value in options.items() for part in (f"--{name}", _text(value))]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
