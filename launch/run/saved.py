"""Reading the folder of a run or an export: the recipe, the summary, and the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from thinwire.errors.imports import is_path
from thinwire.launch.run import recipe
from thinwire.launch.run.model_files import ModelFacts, read_facts
from thinwire.launch.run.recipe import Recipe
from thinwire.launch.run.weights import newest, weight_file
from thinwire.models.digest import tensor_lines, weights_digest
from thinwire.models.options import PRETRAINED, ModelOptions
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.options import CompressionOptions


@dataclass(frozen=True)
class SavedRun:
    """The last save of a run: its recipe, its summary, its weights by full name, and facts about its model."""

    folder: Path
    recipe: Recipe
    summary: Mapping[str, Any]
    weights: dict[str, Tensor]
    facts: ModelFacts


def read_run(folder: Path, prog: str) -> SavedRun:
    """Read the last save of a run. OptionsError if files are missing, or if they are not from one save."""
    if not folder.is_dir():
        raise OptionsError(f"RUN must be the folder of a run, got {folder}, which does not exist")
    needed = [folder / "recipe.yaml", _summary_of_weights(folder)]
    if missing := [str(path) for path in needed if not path.is_file()]:
        raise OptionsError(f"RUN must be the folder of a run with saved weights, but {', '.join(missing)} is missing")
    found = recipe.parse([str(needed[0])], prog=prog)
    summary = _read_summary(needed[1])
    weights = _read_weights(folder, found.pipeline.num_stages)
    if weights_digest(tensor_lines(weights)) != summary["weights_digest"]:
        raise OptionsError(
            f"the weights in {folder} must belong to the summary of the run, but their digests differ; copy the files "
            f"of all stages from the same run"
        )
    return SavedRun(folder, found, summary, weights, read_facts(folder))


def chosen_codecs(compression: CompressionOptions, summary: Mapping[str, Any]) -> CompressionOptions:
    """The codecs that a run used, with the choice of auto in place of auto. Before the choice, auto is no compression.

    Args:
        compression: the options of the run's recipe.
        summary: the summary of the run.
    """
    if not compression.automatic:
        return compression
    chosen = {(choice["boundary"], choice["channel"]): choice["codec"] for choice in summary["choices"]}
    return compression.chosen(chosen) if chosen else compression.before_choice()


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary that belongs to the newest weights of a run. OptionsError if it is missing or damaged."""
    path = _summary_of_weights(folder)
    if not path.is_file():
        raise OptionsError(f"RUN must be the folder of a run with saved weights, but {path} is missing")
    return _read_summary(path)


def _summary_of_weights(folder: Path) -> Path:
    """The path of the summary that belongs to the newest weights: the run's own, or the one beside the weights.

    If a run was killed while it saved, its own summary may be of older weights.
    """
    saved, own = newest(folder), folder / "summary.json"
    if saved is None:
        return own
    beside = folder / "weights" / saved.folder / "summary.json"
    agree = own.is_file() and beside.is_file() and _read_summary(own)["steps"] == saved.step
    return own if agree or not beside.is_file() else beside


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_text())
        summary["weights_digest"], summary["held_out"], summary["channels"], summary["steps"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise OptionsError(
            f"{path} must be the summary of a run, but it is damaged ({error!r}); copy it again, or train again"
        ) from error
    return dict(summary)


def weights_of(model: ModelOptions, folder: Path) -> ModelOptions:
    """The model of a recipe with the weights in the folder of an export."""
    place = str(folder.resolve())
    if is_path(model.name):
        return replace(model, weights=place)
    if (folder / "config.json").exists():
        return replace(model, name=place, weights=PRETRAINED, config={})
    return replace(model, weights=place)


def _read_weights(folder: Path, num_stages: int) -> dict[str, Tensor]:
    saved = newest(folder)
    if saved is None:
        raise OptionsError(f"{folder / 'weights'} must hold a whole set of weights, but has no newest.json")
    files = [weight_file(folder, saved, stage) for stage in range(num_stages)]
    if missing := [path.name for path in files if not path.is_file()]:
        raise OptionsError(
            f"{folder / 'weights'} must hold the weights of {num_stages} stages, but {', '.join(missing)} is "
            f"missing; copy it from the machine that held the stage"
        )
    weights: dict[str, Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as opened:
            weights |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return weights
