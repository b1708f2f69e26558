"""Where the points of a run's curves go besides its own files: to services by name, or to a user's function."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from thinwire.compress.stores.marks import claim, run_of
from thinwire.errors.calls import first_line
from thinwire.errors.imports import find, is_path
from thinwire.launch.recipe.fields import values_of
from thinwire.launch.recipe.recipe import Recipe, dump
from thinwire.pipeline.errors import OptionsError

Points = dict[str, float]
Hook = Callable[[Points], object]
"""Gets what is logged after a step, an evaluation or an exchange: numbers by name, and the step."""

SERVICES = ("tensorboard", "wandb", "trackio", "mlflow")
"""Packages that keep curves, by name."""


def check_hooks(names: Sequence[str]) -> None:
    """Raise OptionsError unless each of `logging` is there; services are not imported."""
    mistakes = []
    for name in names:
        if name in SERVICES:
            if find_spec(name) is None:
                mistakes.append(f"logging to {name} needs its package: pip install {name}")
        elif not is_path(name):
            mistakes.append(f"logging must be {', '.join(SERVICES)} or module:function, got {name!r}")
        elif not callable(found := find(name, OptionsError, "logging")):
            mistakes.append(f"logging must be a function of a dict of numbers, got {type(found).__name__} at {name}")
    if mistakes:
        raise OptionsError(mistakes)


class Hooks:
    """The hooks of a run. One that fails is left out from then on, so that training goes on.

    Args:
        recipe: names the hooks; services keep it as the configuration of their run.
        run: the id of the run since its first step: after a resume, services go on under it.
        first: the step that the run goes on from. TensorBoard forgets the points of later steps that it has seen.
    """

    def __init__(self, recipe: Recipe, run: str, first: int) -> None:
        self._hooks: dict[str, Hook] = {}
        self._tables: dict[str, Callable[[Sequence[Mapping[str, Any]]], object]] = {}
        self._ends: dict[str, Callable[[], object]] = {}
        self._failed: list[str] = []
        for name in recipe.logging:
            if name == "tensorboard":
                self._hooks[name] = self._tensorboard(recipe, first)
            elif name in SERVICES:
                begin = self._mlflow if name == "mlflow" else self._service
                try:
                    self._hooks[name] = begin(name, recipe, run)
                except Exception as error:
                    raise OptionsError(f"logging to {name} cannot begin: {first_line(error)}") from error
            else:
                found: Any = find(name, OptionsError, "logging")
                self._hooks[name] = found

    def _tensorboard(self, recipe: Recipe, first: int) -> Hook:
        from torch.utils.tensorboard import SummaryWriter

        folder = recipe.folder / "tensorboard"
        claim(folder, run_of(recipe.folder) or "")
        # the evaluation at `first` stays; a first start is written too, or TensorBoard takes the next one for it
        writer = SummaryWriter(str(folder), purge_step=first + 1 if first else 0)
        writer.add_text("recipe", f"```yaml\n{dump(recipe)}```")
        self._ends["tensorboard"] = writer.close

        def add(points: Points) -> None:
            for name in points.keys() - {"step"}:
                writer.add_scalar(name, points[name], int(points["step"]))

        return add

    def _service(self, name: str, recipe: Recipe, run: str) -> Hook:
        package = importlib.import_module(name)
        # trackio goes on with any run that has the name, from whatever folder
        own = {"name": recipe.name, "id": run} if name == "wandb" else {"name": f"{recipe.name}-{run[:8]}"}
        package.init(project="thinwire", config=asdict(recipe), resume="allow", **own)
        if name == "wandb":  # an exchange is logged after later steps
            package.define_metric("*", step_metric="step")
        self._ends[name] = package.finish

        def add(points: Mapping[str, Any]) -> None:
            if name == "wandb":
                package.log(points)
            else:  # trackio keeps the name "step" for itself, and would number the points anew
                package.log({key: points[key] for key in points if key != "step"}, step=points["step"])

        def add_table(rows: Sequence[Mapping[str, Any]]) -> None:
            from pandas import DataFrame

            add({"step": rows[0]["step"], "answers": package.Table(dataframe=DataFrame(rows))})

        self._tables[name] = add_table
        return add

    def _mlflow(self, name: str, recipe: Recipe, run: str) -> Hook:
        package: Any = importlib.import_module(name)
        package.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "thinwire"))
        found = package.search_runs(filter_string=f"tags.thinwire = '{run}'", output_format="list")
        package.start_run(found[0].info.run_id if found else None, run_name=recipe.name, tags={"thinwire": run})
        if not found:  # they never change there; the recipe of a run that goes on may
            package.log_params(values_of(asdict(recipe)))
        package.log_text(dump(recipe), "recipe.yaml")
        self._ends[name] = package.end_run
        self._tables[name] = lambda rows: package.log_table(
            {column: [row[column] for row in rows] for column in rows[0]}, "answers.json"
        )
        # which takes no comma in a name
        return lambda points: package.log_metrics(
            {key.replace(",", ""): points[key] for key in points if key != "step"}, step=int(points["step"])
        )

    def __call__(self, step: int, points: Mapping[str, float]) -> None:
        """Give the points of a step to all hooks."""
        self._give(self._hooks, {"step": step, **points})

    def answers(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Give the answers after a step to the services that keep tables: rows with the same columns."""
        self._give(self._tables, rows)

    def _give(self, takers: Mapping[str, Callable[[Any], object]], what: Any) -> None:
        for name, take in list(takers.items()):
            try:
                take(what)
            except Exception as error:  # of whatever the user wrote, or of a network
                del self._hooks[name]
                self._tables.pop(name, None)
                self._failed.append(f"logging to {name} failed, and is left out from now on: {first_line(error)}")

    def news(self) -> str | None:
        """A sentence about the hooks that have failed since the last call; None if none has."""
        failed, self._failed = self._failed, []
        return "; ".join(failed) or None

    def close(self) -> None:
        """Let the services send what is left; `news` names one that cannot."""
        for name, end in self._ends.items():
            try:
                end()
            except Exception as error:
                self._failed.append(f"logging to {name} failed at its end, and may lack points: {first_line(error)}")
