"""The cells of a study, one run for each row and seed: what each depends on, and what has become of it.

FOLDER/cells/ROW/seed-N/    the folder of a run, like any other
  cell.json                 what it was made from: fields of the recipe, data, code, machine
  log.txt                   what the run printed
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from thinwire.errors import ThinwireError
from thinwire.errors.files import opened, read_object
from thinwire.launch.folder.weights import with_run_weights
from thinwire.launch.recipe import recipe
from thinwire.launch.recipe.fields import WITHOUT_EFFECT, is_among, values_of
from thinwire.launch.study.definition import Options, Scale, Study
from thinwire.pipeline.errors import OptionsError

if TYPE_CHECKING:
    from thinwire.launch.recipe.recipe import Recipe
    from thinwire.models.data.samples import Data

A = TypeVar("A")
B = TypeVar("B")

State = Literal["finished", "goes on", "begins", "begins anew"]
"""What a study does with a cell: keep it, resume it, begin it, or begin it again because its origin has changed."""
Origin = Mapping[str, Any]
"""What a cell's numbers depend on, as JSON values by dotted name: recipe, data, files of the model, code."""

PROG = "thinwire study"

CHECKPOINTS = ("--checkpoint.every", "1 epoch", "--checkpoint.keep", "1")
"""When a cell writes a checkpoint, if the study does not say it."""

_CODE = ("thinwire.compress", "thinwire.models", "thinwire.pipeline", "thinwire.launch.plan", "thinwire.launch.run")
"""The packages whose code decides a cell's numbers."""
_OF_A_MODEL = ("config.json", "*.safetensors", "*.safetensors.index.json", "stage-*/*.safetensors")
"""The files of a model's folder that its numbers depend on."""
_OWN = re.compile(r"([A-Za-z_][\w.]*)[:.][A-Za-z_]\w*")
"""An object of your own, as a recipe names it: module:factory, or a codec module.Class(4)."""
_TAIL = 4096
"""Bytes at the end of a log that hold its last line."""


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    row: str
    seed: int
    folder: Path
    asked: tuple[str, ...]
    """The arguments that the study and the scale give; they come first."""
    own: tuple[str, ...]
    """Those that the row sets itself."""
    given: tuple[str, ...] = ()
    """Options of the command line. They override the study's and the scale's, but not those of the row, which make it
    what it is."""
    base: Path | None = None
    """The folder of the cell whose last weights are the first of this one."""

    @property
    def name(self) -> str:
        """Its name in tables and messages."""
        return f"{self.row}, seed {self.seed}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of `thinwire simulate`."""
        last = ("--training.seed", str(self.seed), "--name", f"{_slug(self.row)}-seed-{self.seed}")
        return (*self.asked, *self.given, *self.own, *last, "--output", str(self.folder))

    def starting(self, weights: str) -> tuple[str, ...]:
        """The arguments, with these first weights if the cell starts with those of another."""
        return (*self.arguments, "--model.weights", weights) if self.base else self.arguments


def cells_of(study: Study, scale: Scale, folder: Path, given: Sequence[str] = ()) -> list[Cell]:
    """All cells, seed by seed, so that every row has a result early.

    `folder` is that of the cells of this scale; `given` are options of the command line, for every cell.

    Raises:
        OptionsError: two rows would have one folder.
    """

    def place(row: str, seed: int) -> Path:
        return folder / "cells" / _slug(row) / f"seed-{seed}"

    places: dict[Path, str] = {}
    for row in study.rows_at(scale):
        if (other := places.setdefault(place(row, 0), row)) != row:
            raise OptionsError(f"rows {other!r} and {row!r} would have one folder, {_slug(row)}; rename one of them")
    cells = []
    for seed in scale.seeds or study.seeds:
        for row, content in study.rows_at(scale).items():
            own = _arguments(content.options)
            common = _arguments({**study.options, **scale.options})
            asked = (scale.recipe or study.recipe, *CHECKPOINTS, *common)
            base = place(content.starts_with, seed) if content.starts_with else None
            cells.append(Cell(row, seed, place(row, seed), asked, tuple(own), tuple(given), base))
    return cells


def _slug(row: str) -> str:
    """A folder's name for a row. A few characters of a hash distinguish rows whose names differ only in signs."""
    plain = re.sub(r"[^a-z0-9.]+", "-", row.lower()).strip("-.")[:60]
    digest = hashlib.sha256(row.encode()).hexdigest()[:4]
    return plain if re.sub(r"[ ,]+", "-", row.lower()) == plain else f"{plain}-{digest}"


def _arguments(options: Options) -> list[str]:
    """Options as a command line has them."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()}
    return [part for name, text in texts.items() for part in (f"--{name}", text)]


def typed(words: Sequence[str]) -> dict[str, str]:
    """The values of the options of a command line, by name without dashes."""
    values: dict[str, str] = {}
    for word in words:
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            values[name] = value
        elif values:
            values[[*values][-1]] += word
    return values


def sets(own: Options, name: str) -> bool:
    """Whether a row's own options set a field, so that one on the command line changes nothing in it."""
    return name in own or ("codec" in own and name in ("compression.activations", "compression.gradients"))


def check(cells: Sequence[Cell], score: str) -> list[tuple[Origin, Recipe]]:
    """Read every cell's recipe and data, and cut its model; nothing is written. The origin and the recipe of each.

    `score` is the one that they are compared by.

    Raises:
        OptionsError: some cells cannot be run; every mistake once, with the first cell that has it.
    """
    recipes = _recipes(cells)
    from thinwire.launch.plan.prepare import prepare

    def kind(wanted: Recipe) -> str:
        return repr((wanted.model, wanted.data, wanted.pipeline, replace(wanted.training, seed=0)))

    prepared = _each(cells, recipes, prepare, kind)
    _each(cells, prepared, lambda found: _check_score(found.data, score), lambda found: str(id(found)))
    return [(origin_of(own, cut.data), cut.recipe) for own, cut in zip(recipes, prepared, strict=True)]


def asked_of(cells: Sequence[Cell]) -> list[Origin]:
    """The origins of cells without what needs their data, models and code: the fields of their recipes.

    Raises:
        OptionsError: some recipes cannot be read; every mistake once, with the first cell that has it.
    """
    return list(map(fields_of, _recipes(cells)))


def _recipes(cells: Sequence[Cell]) -> list[Recipe]:
    # the weights of another cell may not be there yet
    return _each(cells, [cell.starting("fresh") for cell in cells], _recipe_of, repr)


def _each(cells: Sequence[Cell], values: Sequence[A], do: Callable[[A], B], key: Callable[[A], str]) -> list[B]:
    """What is made of each cell's value, once for each key. OptionsError with every mistake, and its first cell."""
    known: dict[str, B] = {}
    mistakes: dict[str, str] = {}
    for cell, value in zip(cells, values, strict=True):
        try:
            known[key(value)] = known[key(value)] if key(value) in known else do(value)
        except ThinwireError as error:
            for mistake in error.mistakes:
                mistakes.setdefault(mistake, cell.name)
    if mistakes:
        raise OptionsError([f"{name}: {mistake}" for mistake, name in mistakes.items()])
    return [known[key(value)] for value in values]


def _recipe_of(argv: Sequence[str]) -> Recipe:
    """The recipe of a cell. OptionsError if it is none, or a smoke run, which does not write to the cell's folder."""
    wanted = recipe.parse(argv, prog=PROG)
    OptionsError.require(
        (
            not wanted.debug.smoke,
            "debug.smoke must be false, because a smoke run is no cell of a study; to try the study, use a scale of "
            "few steps, as --scale smoke of the packaged ones, or --check",
        )
    )
    return wanted


def _check_score(data: Data, score: str) -> None:
    """Raise OptionsError if cells with these data have no such score."""
    known = ("loss", *data.task.scores)
    OptionsError.require(
        (score in known, f"score must be one of {', '.join(known)} for this recipe, got {score!r}"),
        (
            data.held_out is not None,
            "a study compares scores of held-out samples, and there are none; set data.held_out above 0, or "
            "data.evaluation",
        ),
    )


def origin_of(wanted: Recipe, data: Data) -> dict[str, Any]:
    """The origin of a cell with this recipe, whose own modules are imported, and these data."""
    kept = fields_of(wanted)
    start = with_run_weights(wanted.model)
    folders = [Path(place) for place in dict.fromkeys((start.name, start.weights, start.lora.weights))]
    of_model = [path for folder in folders for pattern in _OF_A_MODEL for path in sorted(folder.glob(pattern))]
    named = {name for value in kept.values() for name in _OWN.findall(str(value))}
    own = [getattr(sys.modules.get(name), "__file__", None) for name in sorted(named)]
    return {
        **kept,
        "data": [data.training.digest, data.held_out_digest],
        "code": code_digest(),
        "model's files": list(map(_file_digest, of_model)),
        "own code": [_file_digest(Path(path)) for path in own if path],
    }


def fields_of(wanted: Recipe) -> dict[str, Any]:
    """The fields of a recipe that a cell's numbers depend on, as JSON values by dotted name."""
    kept = {name: value for name, value in values_of(asdict(wanted)).items() if not is_among(name, WITHOUT_EFFECT)}
    values: dict[str, Any] = json.loads(json.dumps(kept))
    return values


@cache
def code_digest() -> str:
    """SHA-256 of the code that decides a cell's numbers, the first 12 characters."""
    hashed = hashlib.sha256()
    for package in _CODE:
        root = Path(str(files(package)))
        for path in sorted(root.rglob("*.py")):
            hashed.update(f"{package}/{path.relative_to(root)}\n".encode() + path.read_bytes())
    return hashed.hexdigest()[:12]


def _file_digest(path: Path) -> str:
    return _digest_of(path, path.stat().st_mtime_ns)


@cache
def _digest_of(path: Path, changed: int) -> str:
    """SHA-256 of a file that was last changed then, the first 12 characters."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def find(cell: Cell, origin: Origin, *, any_code: bool = False, base: State | None = None) -> tuple[State, list[str]]:
    """The state of a cell of this origin by its folder, and the names of what has changed there.

    With `any_code` only what both origins have is compared, and no code: so a cell is kept that another version of the
    code has made. `base` is the state of the cell whose weights this one starts with.
    """
    made = read_json(cell.folder / "cell.json")
    if (saved := made.get("origin")) is None:
        return ("begins anew", ["cell.json, which is damaged"]) if is_finished(cell.folder) else ("begins", [])
    names = (saved.keys() & origin.keys()) - {"code"} if any_code else saved.keys() | origin.keys()
    changed = sorted(name for name in names if saved.get(name) != origin.get(name))
    start = weights_digest(cell.base)
    if base == "begins anew" or ((cell.base is None or start is not None) and start != made.get("base")):
        changed.append("the weights that it starts with")
    if changed:
        return "begins anew", changed
    if is_finished(cell.folder):
        return "finished", []
    return ("goes on" if list(cell.folder.glob("checkpoints/*/manifest.json")) else "begins"), []


def is_finished(folder: Path) -> bool:
    """Whether a run has taken all its steps and its summary says so."""
    summary = read_json(folder / "summary.json")
    steps = summary.get("steps")
    return summary.get("running") is False and steps is not None and steps == summary.get("planned_steps")


def weights_digest(folder: Path | None) -> str | None:
    """The digest of a run's last weights; None where there is no summary."""
    return read_json(folder / "summary.json").get("weights_digest") if folder else None


def last_line(path: Path) -> str:
    """The last line of a file; empty where there is none."""
    try:
        with opened(path) as file:
            file.seek(max(0, path.stat().st_size - _TAIL), os.SEEK_SET)
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none, or it is damaged."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}
