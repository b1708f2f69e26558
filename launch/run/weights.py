"""The weights that a run saves: one file for each stage, and a manifest that names the newest complete set.

weights/
  newest.json                       {"step": 40, "stages": 4, "folder": "step-40"}
  step-40/stage-I.safetensors
  step-40/summary.json              the summary after that step, on the disk of the last stage

The order makes a set complete at any time:

1. Every stage writes its file into the new set; the set before stays.
2. All stages say that their file is on disk.
3. The manifest is renamed into place and names the new set.
4. The set before is removed.

So the weights that the manifest names are always of one step, whenever a run is killed. Each disk has a manifest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.compress.stores.durable import part_of, remove_parts, sync, write_durably
from thinwire.compress.stores.marks import claim, remove, run_of, stray
from thinwire.errors.files import read_object
from thinwire.models.file_mode import follow_umask
from thinwire.models.options import FRESH, PRETRAINED, ModelOptions
from thinwire.pipeline.errors import OptionsError

if TYPE_CHECKING:
    from torch import Tensor

_MANIFEST = "newest.json"
_MOST_STAGES = 100_000
_NAME = re.compile(r"step-\d+(-again)?")


@dataclass(frozen=True)
class WeightSet:
    """The weights of all stages after the same step."""

    step: int
    stages: int
    folder: str
    """Its name in weights/."""


class Saving:
    """A set that one process is writing. Create it in all processes before any process completes the set.

    Args:
        folder: the folder of the run.
        step: number of optimizer steps done.
        stages: number of stages of the pipeline.
    """

    def __init__(self, folder: Path, step: int, stages: int) -> None:
        self._base, self._run = folder / "weights", run_of(folder) or ""
        self._before = newest(folder)
        name = f"step-{step}"
        if self._before is not None and self._before.folder == name:
            name += "-again"  # a second run of this name must not write into the set of the first
        self._set = WeightSet(step, stages, name)
        # all processes are between two sets, so a killed run left any third one
        _remove_sets(self._base, {name, self._before.folder if self._before else name})

    def write(self, stage: int, state: Mapping[str, Tensor]) -> None:
        """Write the weights of one stage, named as in the unsplit model, and wait until they are on the disk."""
        from safetensors.torch import save_file

        target = self.folder / f"stage-{stage}.safetensors"
        claim(self._base, self._run)
        claim(target.parent, self._run)
        fresh = part_of(target)
        metadata = {"step": str(self._set.step)}
        save_file(_apart(state), fresh, metadata=metadata)
        follow_umask(fresh)
        sync(fresh)
        fresh.replace(target)
        sync(target.parent)

    @property
    def folder(self) -> Path:
        """The folder of this set."""
        return self._base / self._set.folder

    def complete(self) -> None:
        """Name this set in the manifest, and remove the set before. Call it after every stage has written its file."""
        write_durably(self._base / _MANIFEST, f"{json.dumps(asdict(self._set))}\n".encode())
        if self._before is not None and self._before.folder != self._set.folder:
            remove(self._base / self._before.folder)  # other processes remove it as well

    def discard(self) -> None:
        """Remove the files of a set that cannot be completed."""
        remove(self.folder)


def newest(folder: Path) -> WeightSet | None:
    """The newest complete set in a run's folder, or None. OptionsError if the manifest is damaged."""
    path = folder / "weights" / _MANIFEST
    if not path.exists():
        return None
    if (said := stray(path.parent, run_of(folder))) is not None:
        raise OptionsError(f"{folder} must hold the weights of a run, but {said}; remove it")
    try:
        found = WeightSet(**read_object(path))
        numbers = type(found.step) is int and type(found.stages) is int and 0 < found.stages <= _MOST_STAGES
        if not numbers or not _NAME.fullmatch(found.folder):
            raise ValueError("its fields have other types")
    except (OSError, ValueError, TypeError) as error:
        raise OptionsError(f"{path} must name a set of weights, but it is damaged: {error}; remove it") from error
    return found


def weight_file(folder: Path, saved: WeightSet, stage: int) -> Path:
    """The file with the weights of one stage."""
    return folder / "weights" / saved.folder / f"stage-{stage}.safetensors"


def with_run_weights(model: ModelOptions) -> ModelOptions:
    """The model with the newest weights of a run, if its weights name the folder of a run; else the model as it is.

    Raises:
        OptionsError: the files of some stages are missing, as on a machine that did not hold them.
    """
    folder = Path(model.weights)
    saved = None if model.weights in (FRESH, PRETRAINED) else newest(folder)  # these words are never folders
    if saved is None:
        return model
    files = [weight_file(folder, saved, stage) for stage in range(saved.stages)]
    if missing := [path.name for path in files if not path.is_file()]:
        raise OptionsError(
            f"model.weights names a run, so {files[0].parent} must hold the weights of its {saved.stages} stages, but "
            f"{', '.join(missing)} is missing; copy it from the machine that held the stage"
        )
    return replace(model, weights=str(files[0].parent))


def remove_leftovers(folder: Path) -> None:
    """Remove incomplete sets of killed runs. No run may be saving in this folder."""
    kept = newest(folder)
    _remove_sets(folder / "weights", {kept.folder} if kept else set())
    for place in (folder, folder / "weights"):
        if run_of(place) is not None:
            remove_parts(place)


def _apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, contiguous and each in memory of its own: a module may have a second name in a layer."""
    found: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in state.items():
        memory = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if memory in taken else tensor.contiguous()
        taken.add(memory)
    return found


def _remove_sets(base: Path, kept: Collection[str]) -> None:
    for path in base.glob("step-*"):
        if path.name not in kept:
            remove(path)
