"""The weights that a run saves: a file a stage, and a manifest that names the newest set that is whole.

weights/
  newest.json                       {"step": 40, "stages": 4, "folder": "step-40"}
  step-40/stage-I.safetensors

A set counts once the manifest names it. Every stage writes its file beside the set before; once all have said that
theirs is on its disk, the manifest is renamed into place, and only then the set before goes. So whenever a run is
killed, the weights that the manifest names are of one step. Where stages have disks of their own, each has a manifest.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from thinwire.models.file_mode import follow_umask
from thinwire.pipeline.errors import OptionsError

_MANIFEST = "newest.json"
_NAME = re.compile(r"step-\d+(-again)?")


@dataclass(frozen=True)
class WeightSet:
    """The weights of all stages after the same step."""

    step: int
    stages: int
    folder: str
    """Its name in weights/."""


class Saving:
    """One set on its way to the disk, as one process sees it; made before any process completes the set.

    Args:
        folder: of the run.
        step: optimizer steps that were done.
        stages: how many stages the pipeline has.
    """

    def __init__(self, folder: Path, step: int, stages: int) -> None:
        self._base = folder / "weights"
        self._before = newest(folder)
        name = f"step-{step}"
        if self._before is not None and self._before.folder == name:
            name += "-again"  # a run of the same name, which must not write into the set of the one before
        self._set = WeightSet(step, stages, name)
        # all processes are between two sets, so what is neither the one nor the other was left by a killed run
        _remove_sets(self._base, {name, self._before.folder if self._before else name})

    def write(self, stage: int, state: Mapping[str, Tensor]) -> None:
        """Write one stage's weights, named as in the unsplit model, and wait until the disk has them."""
        target = self._base / self._set.folder / f"stage-{stage}.safetensors"
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_suffix(".part")
        metadata = {"step": str(self._set.step)}
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, fresh, metadata=metadata)
        follow_umask(fresh)
        _sync(fresh)
        fresh.replace(target)
        _sync(target.parent)

    def complete(self) -> None:
        """Have the manifest name this set, and remove the one before; once every stage has written its file."""
        write_whole(self._base / _MANIFEST, json.dumps(asdict(self._set)) + "\n")
        if self._before is not None and self._before.folder != self._set.folder:
            shutil.rmtree(self._base / self._before.folder, ignore_errors=True)  # other processes remove it as well

    def discard(self) -> None:
        """Remove what was written of a set that cannot be completed."""
        shutil.rmtree(self._base / self._set.folder, ignore_errors=True)


def newest(folder: Path) -> WeightSet | None:
    """The newest whole set that a run saved here; None where there is none. OptionsError if the manifest is damaged."""
    path = folder / "weights" / _MANIFEST
    if not path.is_file():
        return None
    try:
        found = WeightSet(**json.loads(path.read_text()))
        if not _NAME.fullmatch(found.folder) or not isinstance(found.step, int) or not isinstance(found.stages, int):
            raise ValueError("its fields are of other kinds")
    except (ValueError, TypeError, RecursionError) as error:
        raise OptionsError(f"{path} must name a set of weights, and is damaged: {error}; remove it") from error
    return found


def weight_file(folder: Path, saved: WeightSet, stage: int) -> Path:
    """Where the weights of one stage are."""
    return folder / "weights" / saved.folder / f"stage-{stage}.safetensors"


def remove_leftovers(folder: Path) -> None:
    """Remove what killed runs left of sets that never were whole; no run may be saving there."""
    kept = newest(folder)
    _remove_sets(folder / "weights", {kept.folder} if kept else set())
    for pattern in ("weights/*.part", "*.part"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file that is there whole or, where the disk is full or the process is killed, as it was before."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        fresh.write_text(text)
        _sync(fresh)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _remove_sets(base: Path, kept: Collection[str]) -> None:
    for path in base.glob("step-*"):
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file or folder is on its disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
