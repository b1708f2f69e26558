"""Reading the folder of a run or an export: the recipe, the summary, and the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from torch.nn import Module

from thinwire.compress.stores.marks import stray
from thinwire.errors.files import read_object
from thinwire.errors.imports import is_path
from thinwire.launch.folder.model_files import ModelFacts, read_facts
from thinwire.launch.folder.weights import find_checkpoint
from thinwire.launch.recipe import recipe
from thinwire.launch.recipe.recipe import Recipe
from thinwire.models.layers import Stage
from thinwire.models.options import PRETRAINED, ModelOptions
from thinwire.pipeline.errors import OptionsError

Told = TypeVar("Told")


@dataclass(frozen=True)
class SavedRun:
    """The newest weights of a run, and what is known of them."""

    folder: Path
    recipe: Recipe
    steps: int
    """Optimizer steps that were done."""
    weights: dict[str, Tensor]
    """By full name."""
    facts: ModelFacts
    held_out: Mapping[str, Any]
    """The held-out scores after these steps, by compression; empty where the run was not evaluated then."""
    base: frozenset[str]
    """A line for each frozen weight beside an adapter, as those of a digest; empty without an adapter."""
    error: float | None = None
    """The error of the difference of the two losses over the held-out text, if it is known."""
    gap: float = 0.0
    """How much higher the loss was without compression before training, on one batch; 0 if it is not known."""
    scored: str = ""
    """What the run scored, where the weights are others by now."""
    bits: Mapping[tuple[int, str], float] = field(default_factory=dict)
    """The bits of a value as sent, with headers, by boundary and channel; empty if they are not known."""


def recipe_of(place: str, options: Sequence[str], prog: str) -> Recipe:
    """The recipe of a run, a checkpoint or an export, with its weights; or the recipe that `place` names."""
    if Path(place).is_dir():
        check_inside(Path(place))
        if saved := find_checkpoint(Path(place)):
            found = recipe.parse([str(saved.recipe), *options], prog=prog)
            return replace(found, model=found.model.with_weights(str(saved.path)))
    exported = Path(place, "recipe.yaml")
    if not exported.is_file():
        return recipe.parse([place, *options], prog=prog)
    if not any(exported.parent.glob("*.safetensors")):
        raise OptionsError(
            f"{place} must be an export, or the folder of a run with saved weights or a checkpoint, but it has neither "
            f"yet: a run saves weights at its end, and before with save_every or checkpoint.every"
        )
    found = recipe.parse([str(exported), *options], prog=prog)
    return replace(found, model=weights_of(found.model, exported.parent))


def read_run(folder: Path, prog: str) -> SavedRun:
    """Read the newest weights that a run has saved.

    Raises:
        OptionsError: there are none, or files are missing or damaged, or lead out of the folder.
    """
    check_inside(folder)
    if (saved := find_checkpoint(folder)) is None:
        raise OptionsError(
            f"RUN must be the folder of a run that has saved weights, got {folder}; a run saves them at its end, and "
            f"before with save_every or checkpoint.every"
        )
    found = recipe.parse([str(saved.recipe)], prog=prog)
    held_out, error = saved.scores()
    return SavedRun(
        saved.run,
        found,
        saved.manifest.step,
        saved.weights(),
        read_facts(saved.run / "model"),
        held_out,
        saved.base,
        error,
        _told(saved.run, lambda summary: float(summary["look"]["off"]["loss"] - summary["look"]["on"]["loss"]), 0.0),
        bits=_told(saved.run, _bits, {}),
    )


def _told(run: Path, read: Callable[[Mapping[str, Any]], Told], unknown: Told) -> Told:
    """What the summary of a run says; `unknown` if there is no summary, an old one, or a damaged one."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return read(read_object(run / "summary.json"))
    return unknown


def _bits(summary: Mapping[str, Any]) -> dict[tuple[int, str], float]:
    return {(row["boundary"], row["channel"]): float(row["bits_per_element"]) for row in summary["channels"]}


def check_base(place: str, model: ModelOptions, stages: Iterable[Module]) -> None:
    """Check that the adapter of a run stands beside the frozen weights that it was trained with.

    `place` is as in `recipe_of`; a recipe may put an adapter beside what it likes. `stages` are all of them.

    Raises:
        OptionsError: the frozen weights are others.
    """
    saved = find_checkpoint(Path(model.lora.weights)) if model.lora.rank is not None and Path(place).is_dir() else None
    if saved is None:
        return
    trained = recipe.parse([str(saved.recipe)]).model
    if (trained.dtype == "fp32") != (model.dtype == "fp32"):  # an option rounds them, or does not
        return
    require_base(model.name, stages, saved.base)


def require_base(name: str, stages: Iterable[Module], base: frozenset[str], instead: str = "") -> None:
    """Raise OptionsError if the frozen weights of these stages of a model are not those with the lines `base`."""
    if {line for stage in stages if isinstance(stage, Stage) for line in stage.base.values()} != base:
        raise OptionsError(
            f"{name} must hold the weights that the adapter was trained with, and they have changed; put them back"
            f"{instead}"
        )


def check_inside(folder: Path) -> None:
    """Raise OptionsError if a run or an export, which may come from elsewhere, has a link, a pipe or a device."""
    names = ("recipe.yaml", "model", "weights", "best", "checkpoints", "*.json", "*.jsonl", "*.safetensors")
    for path in (path for name in names for path in sorted(folder.glob(name))):
        if (said := stray(path)) is not None:
            raise OptionsError(f"{folder} must be the folder of a run or an export, but {said}; remove it")


def weights_of(model: ModelOptions, folder: Path) -> ModelOptions:
    """The model of a recipe with the weights in the folder of an export."""
    place = str(folder.resolve())
    if is_path(model.name) or model.lora.rank is not None:
        return model.with_weights(place)
    if (folder / "config.json").exists():
        return replace(model, name=place, weights=PRETRAINED, config={})
    return replace(model, weights=place)
