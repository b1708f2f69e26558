"""The weights that a run has saved: in checkpoints that it goes on from, or in one of weights only, in weights/.

The one in weights/ has the form of any other (`pipeline/saving/checkpoint.py`). It is that of the newest save.
"""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.compress.stores.durable import remove_parts
from thinwire.compress.stores.marks import remove, run_of, stray
from thinwire.errors.files import MARK, as_written, opened, read_object
from thinwire.launch.recipe import recipe
from thinwire.launch.results.log_file import read_lines
from thinwire.models.options import FRESH, PRETRAINED, ModelOptions
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.saving.checkpoint_folder import (
    MANIFEST,
    NEW,
    Manifest,
    SavedStage,
    is_step,
    manifests,
    passed_over,
    reading,
    step_folder,
    step_of,
    steps_of,
    trouble,
    unreadable,
)

if TYPE_CHECKING:
    from torch import Tensor


def newest(run: Path) -> Manifest | None:
    """The manifest of the weights in a run's weights/; None without one. OptionsError if a link leads out of it."""
    _finish(run / "weights")
    found = manifests(run / "weights")
    if found and (said := stray(run / "weights")) is not None:
        raise OptionsError(f"{run} must hold the weights of a run, but {said}; remove it")
    return found[-1] if found else None


def _finish(folder: Path) -> None:
    """Give whole weights their name, where a run was killed before it had done so."""
    for path in folder.glob(f"{NEW}*"):
        named = path.with_name(path.name.replace(NEW, "step-"))
        with suppress(OSError), opened(folder / MARK) as file:  # OSError: a folder of another user
            fcntl.flock(file, fcntl.LOCK_EX)  # a run that saves them at this moment names them itself
            if run_of(path) is not None and (path / MANIFEST).exists():
                remove(named)
                path.rename(named)


def remove_leftovers(run: Path) -> None:
    """Remove incomplete weights of killed runs. No run may be saving in this folder."""
    for folder in (run / "weights", run / "best"):
        for path in [*steps_of(folder), *folder.glob(f"{NEW}*")]:
            if not (path / MANIFEST).exists():
                remove(path)
    for place in (run, run / "weights"):
        if run_of(place) is not None:
            remove_parts(place)


def discard_after(run: Path, step: int) -> None:
    """Remove weights that were saved after a step, and a summary: the run goes on from that step in another way."""
    for path in [path for folder in (run / "weights", run / "best") for path in steps_of(folder)]:
        if step_of(path) > step:
            remove(path)
    with suppress(OSError, ValueError, KeyError, TypeError):  # none, or a damaged one
        if read_object(run / "summary.json")["steps"] > step:
            (run / "summary.json").unlink()


@dataclass(frozen=True)
class SavedCheckpoint:
    """A whole checkpoint, and the folder of its run."""

    run: Path
    folder: Path
    """Where the checkpoint is: that of the checkpoints of the run, or of its weights."""
    manifest: Manifest

    @property
    def recipe(self) -> Path:
        """The run's recipe as a file."""
        return self.run / "recipe.yaml"

    @property
    def path(self) -> Path:
        """The checkpoint's own folder."""
        return step_folder(self.folder, self.manifest.step)

    def scores(self) -> tuple[dict[str, Any], float | None]:
        """The held-out scores after the checkpoint's step, by compression; empty where it was not evaluated then.

        And the error of the difference of the two losses over the text, if it is known.
        """
        path = self.run / "evaluations.jsonl"
        with as_written(path, OptionsError):
            lines = reversed(read_lines(path))
            found: dict[str, Any] = next((line for line in lines if line["step"] == self.manifest.step), {})
            scores = {name: scores for name, scores in found.items() if name in ("on", "off")}
            _check_scores(scores)
            error = found.get("error")
            return scores, None if error is None else float(error)

    def weights(self) -> dict[str, Tensor]:
        """The weights of all stages, named as in the unsplit model. All replicas hold the same."""
        from thinwire.models.checkpoint import WEIGHTS

        stages = map(self._stage, self.manifest.model_parts)
        return {name: tensor for stage in stages for name, tensor in stage.tensors(WEIGHTS).items()}

    @property
    def base(self) -> frozenset[str]:
        """A line for each frozen weight beside an adapter, as those of a digest; empty without an adapter."""
        stages = map(self._stage, self.manifest.model_parts)
        with reading(self.path):
            return frozenset(str(line) for stage in stages for line in stage.values["base"])

    def _stage(self, stage: int) -> SavedStage:
        return SavedStage(self.folder, self.manifest.step, stage)


def _check_scores(scores: Mapping[str, Mapping[str, float]]) -> None:
    """Raise KeyError or TypeError unless these are scores with compression on and off, of the same names, or none.

    A score that was NaN or infinite is None.
    """
    if scores:
        for name, score in (pair for mode in ("on", "off") for pair in scores[mode].items()):
            scores["off"][name], scores["on"][name], score is None or f"{score:.4f}"


def find_checkpoint(place: Path) -> SavedCheckpoint | None:
    """The newest whole checkpoint of a place, of weights only or not; None where it has none.

    A place is the folder of a run, that of its checkpoints or weights, or that of one checkpoint. A checkpoint is whole
    if the weights and values of all stages are there, with the digests of its manifest; rows of stores may be missing.
    Of replicas, the parts of the first are enough. A sentence on stderr names each newer checkpoint that is not whole.

    Raises:
        OptionsError: the checkpoints that are there are damaged or lack parts, or their run is not around them.
    """
    folders, step = _folders_of(place)
    for folder in folders:
        _finish(folder)
    found = [(manifest, folder) for folder in folders for manifest in manifests(folder)]
    found = [(manifest, folder) for manifest, folder in found if step in (None, manifest.step)]
    found.sort(key=lambda one: one[0].step)
    troubles = {} if step is not None else {at: said for folder in folders for at, said in unreadable(folder).items()}
    for manifest, folder in reversed(found):
        if (said := trouble(folder, manifest, manifest.model_parts, stores=False)) is None:
            for sentence in passed_over({at: why for at, why in troubles.items() if at >= manifest.step}):
                print(sentence, file=sys.stderr)
            return SavedCheckpoint(_run_of(place, folder), folder, manifest)
        troubles[manifest.step] = said
    if found:
        manifest, folder = found[-1]
        raise OptionsError(
            f"{step_folder(folder, manifest.step)} must hold the parts of all {len(manifest.model_parts)} stages as "
            f"they were written, but {troubles[manifest.step]}; copy it from the machine that held the stage"
        )
    for sentence in passed_over(troubles):
        print(sentence, file=sys.stderr)
    return None


def _folders_of(place: Path) -> tuple[list[Path], int | None]:
    """The folders of checkpoints that a place names, and the step of one of them if it names that.

    Of two checkpoints after one step, that of the last folder is taken first: weights alone are read faster.
    """
    if (place / MANIFEST).is_file() and is_step(place):
        return [place.parent], step_of(place)
    of_run = (place / "model").is_dir() or (place / "weights").is_dir()  # an export has neither
    if not of_run or not (place / "recipe.yaml").is_file():
        return [place], None
    newest(place)  # which refuses a link
    options = recipe.parse([str(place / "recipe.yaml")]).checkpoint
    saves, said = Path(options.folder or place / "checkpoints"), ""
    if options.folder and options.wanted and not saves.is_dir():
        said = f"the checkpoints of {place} are in {saves}, and from here no such folder is found"
    elif options.folder and (runs := {*map(run_of, steps_of(saves))}) and run_of(place) not in runs:
        said = f"the checkpoints in {saves} are of another run than {place}"
    if said:
        print(f"{said}, so only {place / 'weights'} is looked into", file=sys.stderr)
    return [*([] if said else [saves]), place / "weights"], None


def _run_of(place: Path, checkpoints: Path) -> Path:
    """The folder of a run: the place itself, or the folder around the checkpoints."""
    for run in (place, checkpoints.resolve().parent):
        if (run / "recipe.yaml").is_file():
            return run
    raise OptionsError(
        f"{checkpoints} must lie in the folder of its run, whose recipe.yaml and model/ are needed too; name the "
        f"folder of the run"
    )


def with_run_weights(model: ModelOptions) -> ModelOptions:
    """The model with the newest weights of a run, where its weights or those of its adapter name the folder of a run.

    Raises:
        OptionsError: the parts of some stages are missing, as on a machine that did not hold them; or the weights are
            those of an adapter.
        ModelError: the matrices of the adapter mean something else there.
    """
    start, adapter = (
        None if place in (FRESH, PRETRAINED) else find_checkpoint(Path(place))  # these words are never folders
        for place in (model.weights, model.lora.weights)
    )
    if start is None and adapter is None:
        return model
    from thinwire.models.lora import CONFIG_FILE, check_config

    if start is not None and (start.run / "model" / CONFIG_FILE).is_file():
        raise OptionsError(
            f"model.weights must name whole weights, but {model.weights} is a run that trained an adapter; give that "
            f"run to model.lora.weights, and the weights it began with to model.weights"
        )
    if adapter is not None and (config := adapter.run / "model" / CONFIG_FILE).is_file():
        check_config(config, model.lora)
    weights, of_adapter = (
        place if saved is None else str(saved.path)
        for place, saved in ((model.weights, start), (model.lora.weights, adapter))
    )
    return replace(model, weights=weights, lora=replace(model.lora, weights=of_adapter))
