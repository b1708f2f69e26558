"""The output folder of a run: checked, locked against other runs, and new where --overwrite renames the one before.

A run that is refused does not wait for what a training imports, so this file imports little.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.compress.stores.marks import claim, obstacle, remove, run_of, stray
from thinwire.errors.files import MARK, RUN_FILES, read_text
from thinwire.launch.folder.weights import newest, remove_leftovers
from thinwire.launch.recipe.recipe import Recipe
from thinwire.launch.recipe.yaml_text import load_yaml
from thinwire.launch.results.log_file import is_empty
from thinwire.launch.shared import scratch
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.saving.checkpoint_folder import has_manifests, is_step, manifests, remove_checkpoints

if TYPE_CHECKING:
    from thinwire.pipeline.processes.placement import Placement

_FOLDERS = ("weights", "best", "model", "tensorboard")
"""The folders within that of a run which are the run's own, beside its checkpoints and stores."""
_LOOK_SECONDS = 0.1
_PATIENCE = 3.0
"""Seconds to wait for a folder: another command may only have looked whether a run is there, and the stages of a
launcher that was killed hold it until they have noticed."""


def checkpoint_folder(recipe: Recipe) -> Path:
    """The folder for the checkpoints of a run."""
    return Path(recipe.checkpoint.folder or recipe.folder / "checkpoints")


def check_folders(recipe: Recipe) -> None:
    """Raise OptionsError if the run cannot write to its folders, or would replace there what no run wrote."""
    folders = {"output": recipe.folder}
    if recipe.compression.store_folder:
        folders["compression.store_folder"] = Path(recipe.compression.store_folder)
    if recipe.checkpoint.wanted and recipe.checkpoint.folder:
        folders["checkpoint.folder"] = Path(recipe.checkpoint.folder)
    mistakes = [
        f"{field} must name a folder that can be written, got {folder}: {reason}"
        for field, folder in folders.items()
        if (reason := _refusal(folder))
    ]
    if mistakes := [*mistakes, *foreign(recipe)]:
        raise OptionsError(mistakes)


def foreign(recipe: Recipe) -> list[str]:
    """A sentence for each thing that stands where a run writes, although no run made it, or leads out of its folder."""
    folder, checkpoints = recipe.folder, checkpoint_folder(recipe)
    found = _foreign(folder)
    places = [path for path in checkpoints.glob("*") if is_step(path) or path.name == "base"]
    leads_out = stray(checkpoints) if checkpoints.is_relative_to(folder) else None
    in_the_way = [said for path in sorted(places) if (said := obstacle(path))]
    if said := leads_out or (in_the_way[0] if in_the_way and recipe.checkpoint.wanted else None):
        found.append(f"checkpoint.folder must name a folder where checkpoints have room: {said}; {_WAY_OUT}")
    return found


_WAY_OUT = "move that away, or name another folder"


def _foreign(folder: Path) -> list[str]:
    said = [
        obstacle(folder, RUN_FILES),
        *(obstacle(folder / name) for name in _FOLDERS),
        *(stray(path) for name in ("stores", *RUN_FILES) for path in sorted(folder.glob(name))),
    ]
    return [
        f"output must name a new folder or a run's folder, because a run replaces files there: {each}; {_WAY_OUT}"
        for each in said
        if each
    ]


def claim_folder(recipe: Recipe, where: Placement) -> list[str]:
    """Mark the folder of a run on every host; the ids of all hosts' folders, that of a new one first. Collective.

    Raises:
        OSError: the folder cannot be written.
    """
    from thinwire.pipeline.processes import collectives

    told = collectives.everyone(where, [run_of(recipe.folder), uuid.uuid4().hex])
    known = [run for run, _ in told if run is not None]
    runs = list(dict.fromkeys(known or [told[0][1]]))
    mark(recipe.folder, runs[0])
    return runs


def mark(folder: Path, run: str) -> None:
    """Make the folder of a run and that of its weights with their marks, as far as they have none."""
    claim(folder, run, RUN_FILES)
    claim(folder / "weights", run_of(folder) or run)


def check_unused(recipe: Recipe) -> None:
    """Raise OptionsError as `replacing` says."""
    if refusal := replacing(recipe):
        raise OptionsError(refusal)


def replacing(recipe: Recipe) -> str | None:
    """A sentence that says why a run must not begin; None if its folder has no run, or it goes on, or may replace one.

    A smoke run replaces other smoke runs, and nothing else.
    """
    folder = recipe.folder
    if recipe.debug.smoke:
        if not _holds_run(folder) or _is_smoke(folder / "recipe.yaml"):
            return None
        return f"a smoke run must not replace {folder}, which holds another run; give it another --name or --output"
    weights = (recipe.model.weights, recipe.model.lora.weights)
    return _replacing(folder, checkpoint_folder(recipe), recipe.checkpoint.resume, weights)


def refusal(recipe: Recipe) -> str | None:
    """As `replacing`, and where another run writes to the folder now."""
    try:
        if recipe.folder.is_dir():
            os.close(_locked(recipe.folder, alone=False))
    except OptionsError as error:
        return str(error)
    return replacing(recipe)


def what_is_left(recipe: Recipe) -> str:
    """What is left of a run that ended early, and the command that goes on; empty if no step was done."""
    checkpoints, weights, kept = manifests(checkpoint_folder(recipe)), newest(recipe.folder), ""
    if checkpoints:
        command = shlex.join(["thinwire", "train", "--resume", str(recipe.folder)])
        return f"the newest checkpoint is of step {checkpoints[-1].step}; {command} goes on from there"
    if weights is None and is_empty(recipe.folder / "metrics.jsonl"):
        return ""
    if weights is not None:
        kept = f", but for the weights of step {weights.step} in {recipe.folder / 'weights'}"
    why = (
        f"no checkpoint was complete yet (checkpoint.every is {recipe.checkpoint.every!r})"
        if recipe.checkpoint.wanted
        else "the recipe asks for no checkpoints"
    )
    return f"what was trained is lost{kept}: {why}; --checkpoint.every '100 steps' keeps more of the next run"


def refuse_early(unchecked: Recipe, suffix: str = "") -> None:
    """Refuse a run whose folder another run holds, or has used, by its options alone: their checks import torch.

    A folder that only a recipe's name says has a `suffix`. A smoke run, which names its own folder, is left for later.
    Raises OptionsError.
    """
    if unchecked.debug.smoke:
        return
    folder = Path(unchecked.output or f"{unchecked.folder}{suffix}")
    checkpoints = Path(unchecked.checkpoint.folder or folder / "checkpoints")
    try:
        if refusal := _replacing(folder, checkpoints, unchecked.checkpoint.resume):
            raise OptionsError(refusal)
        if folder.is_dir():
            os.close(_locked(folder, alone=False))
    except PermissionError as error:
        raise OptionsError(f"output must name a folder that can be read, got {folder}: {error.strerror}") from error


def _replacing(folder: Path, checkpoints: Path, resume: str, weights: Sequence[str] = ()) -> str | None:
    if said := _foreign(folder):
        return said[0]
    if resume == "never":
        return _unmovable(folder, checkpoints, weights)
    if resume == "always" or has_manifests(checkpoints) or not _holds_run(folder):
        return None
    resuming, own = f"--resume {folder} is not possible, because the run has no checkpoint", folder / "checkpoints"
    with suppress(OSError, ValueError, TypeError, KeyError):  # its recipe is missing or damaged
        recipe = load_yaml(read_text(folder / "recipe.yaml"), str(folder))
        own = Path(recipe["checkpoint"]["folder"] or own)
    if has_manifests(own):
        resuming = f"--resume {folder} goes on from its checkpoints, which are in {own}, not in {checkpoints}"
    return (
        f"output must name a folder without a run, but {folder} holds one; --overwrite renames it, --output DIR keeps "
        f"both; {resuming}"
    )


def _unmovable(folder: Path, checkpoints: Path, weights: Sequence[str]) -> str | None:
    """A sentence that says why --overwrite must not rename the folder of a run; None if it may, or there is no run."""
    here = folder.resolve()
    elsewhere = not checkpoints.resolve().is_relative_to(here)
    if elsewhere and has_manifests(checkpoints):
        return (
            f"--overwrite needs a checkpoint.folder without checkpoints, but {checkpoints} has some; name another one, "
            f"or move them away"
        )
    if not _holds_run(folder):
        return None
    own = {MARK, "checkpoints", "stores", *_FOLDERS, *RUN_FILES}
    others = sorted(path for path in folder.iterdir() if path.name not in own)
    reasons = [
        *(f"no run made {path}" for path in others[:1]),
        *([f"it is around {Path.cwd()}"] if here in (Path.cwd(), *Path.cwd().parents) else []),
        *(f"the new run begins with {place}" for place in weights if Path(place).resolve().is_relative_to(here)),
    ]
    return f"--overwrite renames {folder}, but {reasons[0]}; {_WAY_OUT}" if reasons else None


def set_aside(recipe: Recipe) -> None:
    """Rename the folder of a run that --overwrite replaces, to NAME.1 or the next free number; empty a smoke run's.

    Several processes may call it, and must wait for each other before they write: the first one renames.

    Raises:
        OptionsError: the folder cannot be renamed, as one where a disk is mounted.
    """
    folder = recipe.folder
    if recipe.debug.smoke:
        clear(folder)
    elif _holds_run(folder):
        free = (folder.with_name(f"{folder.name}.{number}") for number in count(1))
        target = next(path for path in free if not os.path.lexists(path))
        try:
            folder.rename(target)
        except FileNotFoundError:
            return
        except OSError as error:
            raise OptionsError(
                f"--overwrite renames {folder} to {target}, which is not possible: {error.strerror}; move it away, or "
                f"name another --output"
            ) from error
        print(f"the run before this one is in {target}", file=sys.stderr)


def clear(folder: Path) -> None:
    """Remove what a run made in its folder. The folder stays."""
    if run_of(folder) is not None:
        for path in (path for name in RUN_FILES for path in folder.glob(name)):
            path.unlink(missing_ok=True)
        for name in _FOLDERS:
            remove(folder / name)
        remove_checkpoints(folder / "checkpoints")


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """Lock the output folder of a run, and remove incomplete files of killed runs.

    The descriptor holds the lock until this process and all processes that inherit it have ended.

    Raises:
        OptionsError: another run holds the lock.
    """
    descriptor = _locked(folder)
    try:
        remove_leftovers(folder)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def all_held(recipe: Recipe) -> Iterator[list[int]]:
    """As `held`, of the output folder of a run and of the folder that `checkpoint.folder` names; the descriptors.

    Before, what --overwrite replaces is set aside, and a run that must not begin is refused. A run takes the
    checkpoints that it finds there for its own, even where it saves none. Two at once removed each other's.
    """
    with held(recipe.folder):
        check_unused(recipe)
        if recipe.checkpoint.resume == "never":
            set_aside(recipe)
    recipe.folder.mkdir(parents=True, exist_ok=True)
    checkpoints = recipe.checkpoint.folder and Path(recipe.checkpoint.folder)
    with held(recipe.folder) as descriptor:
        if not checkpoints or not checkpoints.is_dir() or os.path.samestat(checkpoints.stat(), os.fstat(descriptor)):
            yield [descriptor]
            return
        other = _locked(checkpoints, field="checkpoint.folder")
        try:
            yield [descriptor, other]
        finally:
            os.close(other)


def _locked(folder: Path, *, alone: bool = True, field: str = "output") -> int:
    """The descriptor of a folder that this process has locked, or shares with others that look into it.

    OptionsError if another run holds the lock; `field` is the option that names the folder.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return scratch.lock(folder, alone=alone)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise OptionsError(
                    f"{field} must name a folder that no other run uses, but a run writes to {folder} now; wait until "
                    f"it has ended, or name another --{field}"
                ) from error
        time.sleep(_LOOK_SECONDS)


def _holds_run(folder: Path) -> bool:
    """Whether the folder has results of a run. A run that failed before its first step has none."""
    results = not is_empty(folder / "metrics.jsonl") or (folder / "summary.json").is_file()
    return results or newest(folder) is not None or has_manifests(folder / "checkpoints")


def _is_smoke(path: Path) -> bool:
    """Whether a file is the recipe of a smoke run."""
    with suppress(OSError, ValueError, TypeError):  # missing or damaged
        fields = load_yaml(read_text(path), str(path))
        return isinstance(fields, dict) and bool(dict(fields.get("debug") or {}).get("smoke"))
    return False


def _refusal(folder: Path) -> str | None:
    """Why the folder cannot be written; None if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except FileExistsError:
        return "a file or a link to nothing is there"
    except OSError as error:
        return error.strerror or str(error)
