"""All cells of a study checked before any of them starts: recipes read, data loaded, models cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from thinwire.errors import ThinwireError
from thinwire.launch.run import recipe
from thinwire.launch.study.cells import Cell
from thinwire.launch.study.origin import file_digest, origin_of
from thinwire.pipeline.errors import OptionsError

if TYPE_CHECKING:
    from thinwire.models.data.samples import Data

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class Checked:
    """A cell that can be run."""

    cell: Cell
    origin: Mapping[str, Any]
    """What its numbers depend on, as JSON values by dotted name."""
    steps: int
    """Optimizer steps of the whole run."""
    processes: int
    """Processes that `thinwire train` starts for it."""
    threads: int
    """Threads of each."""


def check(cells: Sequence[Cell], prog: str, score: str) -> list[Checked]:
    """Read every cell's recipe and data, and cut its model; nothing is written.

    Args:
        cells: the cells.
        prog: the command, for messages.
        score: the score that they are compared by.

    Raises:
        OptionsError: some cells cannot be run; every mistake once, with the first cell that has it.
    """
    # the weights of another cell may not be there yet
    recipes = _each(cells, cells, lambda cell: recipe.parse(list(cell.starting("fresh")), prog=prog))
    from thinwire.launch.run.assembly import prepare
    from thinwire.models.data.load import load

    loaded = _Once(lambda wanted: load(wanted.data), lambda wanted: wanted.data)
    data: list[Data] = _each(cells, recipes, loaded)
    _each(cells, data, lambda found: _check_score(found, score))
    cut = _Once(
        lambda pair: prepare(*pair).recipe.training.steps,
        lambda pair: (pair[0].model, pair[0].data, pair[0].pipeline, replace(pair[0].training, seed=0)),
    )
    steps: list[int] = _each(cells, list(zip(recipes, data, strict=True)), cut)
    digest = _Once(file_digest, str)
    origins: dict[Path | None, dict[str, Any]] = {None: {}}
    for cell, wanted, found in zip(cells, recipes, data, strict=True):  # a base stands before those that start with it
        base = {f"starts_with.{name}": value for name, value in origins[cell.base].items() if name != "code"}
        origins[cell.folder] = {**origin_of(wanted, found, digest), **base}
    return [
        Checked(cell, origins[cell.folder], count, wanted.num_processes, wanted.training.threads)
        for cell, wanted, count in zip(cells, recipes, steps, strict=True)
    ]


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


class _Once:
    """A function whose results, and errors, are kept by what they depend on."""

    def __init__(self, make: Callable[[Any], Any], key: Callable[[Any], Any]) -> None:
        self._make, self._key = make, key
        self._known: dict[str, Any] = {}

    def __call__(self, value: Any) -> Any:
        key = repr(self._key(value))
        if key not in self._known:
            try:
                self._known[key] = self._make(value)
            except ThinwireError as error:
                self._known[key] = error
        if isinstance(self._known[key], ThinwireError):
            raise self._known[key]
        return self._known[key]


def _each(cells: Sequence[Cell], values: Sequence[A], do: Callable[[A], B]) -> list[B]:
    """What is made of each cell's value; OptionsError with every mistake once, and the first cell that has it."""
    found: list[B] = []
    mistakes: dict[str, str] = {}
    for cell, value in zip(cells, values, strict=True):
        try:
            found.append(do(value))
        except ThinwireError as error:
            for mistake in error.mistakes:
                mistakes.setdefault(mistake, cell.name)
    if mistakes:
        raise OptionsError([f"{name}: {mistake}" for mistake, name in mistakes.items()])
    return found
