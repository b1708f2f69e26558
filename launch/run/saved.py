"""Reading the folder of a run or an export: the recipe, the summary, and the weights."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from thinwire.compress.stores.marks import run_of, stray
from thinwire.errors.files import as_written, check_regular, read_object
from thinwire.errors.imports import is_path
from thinwire.launch.run import recipe
from thinwire.launch.run.logs.files import read_lines
from thinwire.launch.run.model_files import ModelFacts, read_facts
from thinwire.launch.run.recipe import Recipe
from thinwire.launch.run.weights import newest, weight_file
from thinwire.models.digest import tensor_lines, weights_digest
from thinwire.models.options import PRETRAINED, ModelOptions
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.frames import CHANNELS
from thinwire.pipeline.options import CompressionOptions
from thinwire.pipeline.saving.checkpoint_folder import (
    Manifest,
    SavedStage,
    is_step,
    manifests,
    passed_over,
    reading,
    step_folder,
    step_of,
    trouble,
    unreadable,
)


@dataclass(frozen=True)
class SavedRun:
    """The last save of a run: its recipe, its summary, its weights by full name, and facts about its model."""

    folder: Path
    recipe: Recipe
    summary: Mapping[str, Any]
    weights: dict[str, Tensor]
    facts: ModelFacts


def read_run(folder: Path, prog: str) -> SavedRun:
    """Read the last save of a run, weights or a checkpoint.

    Raises:
        OptionsError: files are missing, or are not from one save, or lead out of the folder.
    """
    check_inside(folder)
    if checkpoint := find_checkpoint(folder):
        return _of_checkpoint(checkpoint, prog)
    needed = [folder / "recipe.yaml", _summary_of_weights(folder)]
    if missing := [str(path) for path in needed if not path.is_file()]:
        lacking = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        raise OptionsError(f"RUN must be the folder of a run with saved weights, but {lacking}")
    found = recipe.parse([str(needed[0])], prog=prog)
    summary = _read_summary(needed[1])
    weights = _read_weights(folder, found.pipeline.num_stages)
    if weights_digest(tensor_lines(weights)) != summary["weights_digest"]:
        raise OptionsError(
            f"the weights in {folder} must belong to the summary of the run, but their digests differ; copy the files "
            f"of all stages from the same run"
        )
    return SavedRun(folder, found, summary, weights, read_facts(folder))


def check_inside(folder: Path) -> None:
    """Raise OptionsError if a run or an export, which may come from elsewhere, has a link, a pipe or a device."""
    run = run_of(folder)
    names = ("recipe.yaml", "model", "weights", "checkpoints", "*.json", "*.jsonl", "*.safetensors")
    for path in (path for name in names for path in sorted(folder.glob(name))):
        if (said := stray(path, run)) is not None:
            raise OptionsError(f"{folder} must be the folder of a run or an export, but {said}; remove it")


def _of_checkpoint(checkpoint: SavedCheckpoint, prog: str) -> SavedRun:
    """A run as its newest checkpoint has it."""
    found = recipe.parse([str(checkpoint.recipe)], prog=prog)
    weights, choices = checkpoint.weights(), checkpoint.choices
    compression = chosen_codecs(found.compression, choices)
    summary = {
        "steps": checkpoint.manifest.step,
        "held_out": checkpoint.held_out,
        "choices": choices,
        "channels": [
            {"boundary": boundary, "channel": channel, "codec": str(compression.method(boundary, channel))}
            for boundary in range(found.num_boundaries)
            for channel in CHANNELS
        ],
        "weights_digest": weights_digest(tensor_lines(weights)),
    }
    return SavedRun(checkpoint.run, found, summary, weights, read_facts(checkpoint.run))


def chosen_codecs(compression: CompressionOptions, choices: Iterable[Mapping[str, Any]]) -> CompressionOptions:
    """The codecs that a run used, with the choice of auto in place of auto. Before the choice, auto is no compression.

    Args:
        compression: the options of the run's recipe.
        choices: the choices of auto, as JSON values.
    """
    if not compression.automatic:
        return compression
    chosen = {(choice["boundary"], choice["channel"]): choice["codec"] for choice in choices}
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
        summary = read_object(path)
        summary["weights_digest"], int(summary["steps"])
        for row in summary["channels"]:
            row["boundary"], row["channel"], row["codec"]
        _check_scores(summary["held_out"])
        for choice in summary.setdefault("choices", []):
            choice["boundary"], choice["channel"], choice["codec"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise OptionsError(
            f"{path} must be the summary of a run, but it is damaged ({error!r}); copy it again, or train again"
        ) from error
    return summary


def _check_scores(scores: Mapping[str, Mapping[str, float]]) -> None:
    """Raise KeyError or TypeError unless these are scores with compression on and off, of the same names, or none.

    A score that was NaN or infinite is None.
    """
    if scores:
        for name, score in (pair for mode in ("on", "off") for pair in scores[mode].items()):
            scores["off"][name], scores["on"][name], score is None or f"{score:.4f}"


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
        try:
            check_regular(path)
            with safe_open(path, framework="pt") as opened:
                weights |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise OptionsError(
                f"{path} must hold the weights of a stage, but it is damaged ({error}); copy it from the machine that "
                f"held the stage"
            ) from error
    return weights


@dataclass(frozen=True)
class SavedCheckpoint:
    """A whole checkpoint, and the folder of its run."""

    run: Path
    folder: Path
    """That of all checkpoints of the run."""
    manifest: Manifest

    @property
    def recipe(self) -> Path:
        """The run's recipe as a file."""
        return self.run / "recipe.yaml"

    @property
    def choices(self) -> list[Mapping[str, Any]]:
        """The codecs that auto had chosen."""
        with reading(self._stage(0).path):
            found = list(self._stage(0).values["run"]["choices"])
            for choice in found:
                choice["boundary"], choice["channel"], choice["codec"]
        return found

    @property
    def held_out(self) -> dict[str, Any]:
        """The held-out scores after the checkpoint's step, by compression; empty where it was not evaluated then."""
        with as_written(self.run / "evaluations.jsonl", OptionsError):
            lines = read_lines(self.run / "evaluations.jsonl")
            found: dict[str, Any] = next((line for line in reversed(lines) if line["step"] == self.manifest.step), {})
            scores = {name: scores for name, scores in found.items() if name != "step"}
            _check_scores(scores)
        return scores

    def weights(self) -> dict[str, Tensor]:
        """The weights of all stages, named as in the unsplit model. All replicas hold the same."""
        stages = map(self._stage, self.manifest.model_parts)
        return {name: tensor for stage in stages for name, tensor in stage.tensors("weights/").items()}

    def _stage(self, stage: int) -> SavedStage:
        return SavedStage(self.folder, self.manifest.step, stage)


def find_checkpoint(place: Path) -> SavedCheckpoint | None:
    """The newest whole checkpoint of a place; None where it has none, or is a run that has saved later weights.

    A place is the folder of a run, that of its checkpoints, or that of one checkpoint. A checkpoint is whole if the
    weights and values of all stages are there, with the digests of its manifest; rows of stores may be missing. Of
    replicas, the parts of the first are enough. A sentence on stderr names each newer checkpoint that is not whole.

    Raises:
        OptionsError: the checkpoints that are there are damaged or lack parts, or their run is not around them.
    """
    folder, step = _checkpoints_of(place)
    saved = newest(place)
    oldest = -1 if saved is None else saved.step
    later = [found for found in manifests(folder) if step in (None, found.step) and found.step > oldest]
    troubles = {number: said for number, said in unreadable(folder).items() if step is None and number > oldest}
    for manifest in reversed(later):
        if (said := trouble(folder, manifest, manifest.model_parts, stores=False)) is None:
            _say_passed_over({number: why for number, why in troubles.items() if number > manifest.step})
            return SavedCheckpoint(_run_of(place, folder), folder, manifest)
        troubles[manifest.step] = said
    if later and saved is None:
        raise OptionsError(
            f"{step_folder(folder, later[-1].step)} must hold the parts of all {len(later[-1].model_parts)} stages as "
            f"they were written, but {troubles[later[-1].step]}; copy it from the machine that held the stage"
        )
    _say_passed_over(troubles)
    return None


def _say_passed_over(troubles: Mapping[int, str]) -> None:
    for sentence in passed_over(troubles):
        print(sentence, file=sys.stderr)


def _checkpoints_of(place: Path) -> tuple[Path, int | None]:
    """The folder of checkpoints that a place names, and the step of one of them if it names that."""
    if (place / "manifest.json").is_file() and is_step(place):
        return place.parent, step_of(place)
    if not (place / "recipe.yaml").is_file() or not (place / "model").is_dir():  # an export has no model/
        return place, None
    chosen = recipe.parse([str(place / "recipe.yaml")]).checkpoint.folder
    return Path(chosen) if chosen else place / "checkpoints", None


def _run_of(place: Path, checkpoints: Path) -> Path:
    """The folder of a run: the place itself, or the folder around the checkpoints."""
    for run in (place, checkpoints.resolve().parent):
        if (run / "recipe.yaml").is_file():
            return run
    raise OptionsError(
        f"{checkpoints} must lie in the folder of its run, whose recipe.yaml and model/ are needed too; name the "
        f"folder of the run"
    )
