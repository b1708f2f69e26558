"""The output folder of a run: created, checked, and locked against other runs.

A run that is refused does not wait for what a training imports, so this file imports little.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.compress.stores.durable import write_durably
from thinwire.compress.stores.marks import claim, obstacle, remove, run_of, stray
from thinwire.errors.files import MARK, RUN_FILES, read_text
from thinwire.launch.run.logs.files import is_empty
from thinwire.launch.run.recipe import Recipe
from thinwire.launch.run.weights import newest, remove_leftovers
from thinwire.launch.run.yaml_text import dump_yaml, load_yaml
from thinwire.launch.shared import scratch
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.saving.checkpoint_folder import (
    MANIFEST,
    has_manifests,
    is_checkpoint,
    is_step,
    manifests,
    steps_of,
)

if TYPE_CHECKING:
    from thinwire.pipeline.processes.placement import Placement

_REPLACED, _REPLACING = "replaced", "replacing"
"""A run that another one replaces, until that one has saved; and its name while it is moved there."""
_FOLDERS = ("weights", "best", "model", "tensorboard", "trace", _REPLACED, _REPLACING)
"""The folders within that of a run which are the run's own."""
_LOOK_SECONDS = 0.1
_PATIENCE = 3.0
"""Seconds to wait for a folder: another command may only have looked whether a run is there, and the stages of a
launcher that was killed hold it until they have noticed."""


def checkpoint_folder(recipe: Recipe) -> Path:
    """The folder for the checkpoints of a run."""
    return Path(recipe.checkpoint.folder or recipe.folder / "checkpoints")


def check_folders(recipe: Recipe) -> None:
    """Raise OptionsError if the run cannot write to its folders, or would delete there what no run wrote."""
    folders = {"output": recipe.folder}
    if recipe.compression.store_folder:
        folders["compression.store_folder"] = Path(recipe.compression.store_folder)
    if recipe.checkpoint.wanted and recipe.checkpoint.folder:
        folders["checkpoint.folder"] = Path(recipe.checkpoint.folder)
    removed = {
        field: within_another(folder, None if field == "output" else recipe.folder) for field, folder in folders.items()
    }
    OptionsError.require(
        *(
            (reason is None, f"{field} must name a folder that can be written, got {folder}: {reason}")
            for field, folder in folders.items()
            if not removed[field]
            for reason in [_refusal(folder)]
        ),
        *(
            (said is None, f"{field} must name a folder that no other run removes: {said}; name another folder")
            for field, said in removed.items()
            if field != "output"
        ),
        *((False, said) for said in foreign(recipe)),
    )


def foreign(recipe: Recipe) -> list[str]:
    """A sentence for each thing that stands where a run writes, although no run made it, or leads out of its folder."""
    folder, run, checkpoints = recipe.folder, run_of(recipe.folder) or "", checkpoint_folder(recipe)
    found = _foreign(folder)
    places = [path for path in checkpoints.glob("*") if is_step(path) or path.name == "base"]
    places += replaced_folders(recipe)[1:]
    leads_out = stray(checkpoints, run) if checkpoints.is_relative_to(folder) else None
    in_the_way = [said for path in sorted(places) if (said := obstacle(path, run))]
    if said := leads_out or (in_the_way[0] if in_the_way and recipe.checkpoint.wanted else None):
        found.append(f"checkpoint.folder must name a folder where checkpoints have room: {said}; {_WAY_OUT}")
    return found


_WAY_OUT = "move that away, or name another folder"


def _foreign(folder: Path) -> list[str]:
    run = run_of(folder) or ""
    said = [
        within_another(folder, None),
        obstacle(folder, run, RUN_FILES),
        *(obstacle(folder / name, run) for name in _FOLDERS),
        *(stray(path, run) for name in ("stores", *RUN_FILES) for path in sorted(folder.glob(name))),
    ]
    return [
        f"output must name a new folder or that of a run, because a run replaces files there: {each}; {_WAY_OUT}"
        for each in said
        if each
    ]


def within_another(folder: Path, own: Path | None = None) -> str | None:
    """A sentence about a run, but that in `own`, that would remove this folder, because it lies within its folders."""
    path, here = folder.resolve(), own and own.resolve()
    for inner in (path, *path.parents):
        if inner.name in {*_FOLDERS, "checkpoints"} and inner.parent != here and run_of(inner.parent) is not None:
            return f"{inner} belongs to the run in {inner.parent}"
    return None


def claim_folder(recipe: Recipe, where: Placement) -> list[str]:
    """Mark the folder of a run on every host; the ids of all hosts' folders, that of a new one first. Collective.

    Raises:
        OptionsError: on a host something stands in the way.
        OSError: the folder cannot be written.
    """
    from thinwire.pipeline.processes import collectives

    told = collectives.everyone(where, [run_of(recipe.folder), uuid.uuid4().hex, foreign(recipe)])
    if said := [sentence for _, _, sentences in told for sentence in sentences]:
        raise OptionsError(said)
    known = [run for run, _, _ in told if run is not None]
    runs = list(dict.fromkeys(known or [told[0][1]]))
    mark(recipe.folder, runs[0])
    return runs


def mark(folder: Path, run: str) -> None:
    """Make the folder of a run and that of its weights with their marks, as far as they have none."""
    claim(folder, run, RUN_FILES)
    claim(folder / "weights", run_of(folder) or run)


def replaced_folders(recipe: Recipe) -> list[Path]:
    """Where a run that --overwrite replaces is kept until this one has saved; its checkpoints stay on their disk."""
    folder, checkpoints = recipe.folder, checkpoint_folder(recipe)
    elsewhere = [] if checkpoints.is_relative_to(folder) else [checkpoints / _REPLACED]
    return [folder / _REPLACED, *elsewhere]


def replaced_checkpoints(recipe: Recipe) -> str:
    """Words that say where the checkpoints of the replaced run are, if they are not in its own folder."""
    elsewhere = [folder for folder in replaced_folders(recipe)[1:] if folder.is_dir()]
    return "".join(f", and its checkpoints are in {folder}" for folder in elsewhere)


def set_aside(recipe: Recipe, runs: Sequence[str]) -> None:
    """Move a run that --overwrite replaces, if it has saved anything, to `replaced_folders`.

    All processes call it, and wait for each other before they write. What is behind a link stays where it is. `runs`
    are the ids of the run's folders on all hosts.

    Raises:
        OptionsError: a folder within that of the run is on another disk.
    """
    folder, checkpoints, weights = recipe.folder, checkpoint_folder(recipe), recipe.folder / "weights"
    half, (replaced, *elsewhere) = folder / _REPLACING, replaced_folders(recipe)
    with (folder / MARK).open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the first of several processes moves all
        # the run before may have had another checkpoint.folder
        places = {place.resolve(): place for place in (folder / "checkpoints", checkpoints)}
        saved = [path for place in places.values() for path in place.glob("*") if is_checkpoint(path)]
        saved += [] if weights.is_symlink() else steps_of(weights)
        saved = [path for path in saved if run_of(path) in runs]
        whole = any((path / MANIFEST).exists() for path in [*saved, *steps_of(folder / "best"), *steps_of(weights)])
        if not (half.is_dir() or whole):
            return  # what was replaced before is still the newest that is whole
        for path in [] if half.is_dir() else [replaced, *elsewhere]:  # one that was killed here has moved some of it
            remove(path, runs)
        claim(half, runs[0])
        own = [folder / name for name in _FOLDERS if name not in (weights.name, _REPLACED, _REPLACING)]
        own = [path for path in own if run_of(path) is not None and not path.is_symlink()]
        files = [path for name in RUN_FILES for path in folder.glob(name)]
        for path in [*saved, *own, *files]:
            inside = path.is_relative_to(folder)
            target = half / path.relative_to(folder) if inside else elsewhere[0] / path.name
            claim(target.parent, runs[0])
            try:
                path.rename(target)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                raise OptionsError(
                    f"--overwrite moves {path} to {target}, but a disk is mounted in between; mount it elsewhere, or "
                    f"name another --output"
                ) from error
        for place in elsewhere:
            _name_checkpoints(half / "recipe.yaml", checkpoints, place)
        half.rename(replaced)


def _name_checkpoints(path: Path, before: Path, now: Path) -> None:
    """Have a recipe name the folder that its checkpoints were moved to: those of the next run come to that before."""
    with suppress(OSError, ValueError, TypeError, KeyError):  # missing or damaged
        fields = load_yaml(read_text(path), str(path))
        named = fields["checkpoint"]["folder"]
        if named and Path(named).resolve() == before.resolve():
            fields["checkpoint"]["folder"] = str(now)
            write_durably(path, dump_yaml(fields).encode())


def check_unused(recipe: Recipe) -> None:
    """Raise OptionsError if the run would replace another run without --overwrite."""
    if refusal := replacing(recipe):
        raise OptionsError(refusal)


def replacing(recipe: Recipe) -> str | None:
    """A sentence that says why a run must not begin; None if it replaces no run, goes on, or has --overwrite.

    A smoke run replaces other smoke runs, and nothing else.
    """
    folder = recipe.folder
    if not recipe.debug.smoke:
        return _replacing(folder, checkpoint_folder(recipe), recipe.checkpoint.resume)
    if not _holds_run(folder) or _is_smoke(folder / "recipe.yaml"):
        return None
    return f"a smoke run must not replace {folder}, which holds another run; give this one another --name or --output"


def what_is_left(recipe: Recipe) -> str:
    """What is left of a run that ended early, and the command that goes on; empty if no step was done."""
    checkpoints, weights, kept = manifests(checkpoint_folder(recipe)), newest(recipe.folder), ""
    replaced, also = replaced_folders(recipe)[0], replaced_checkpoints(recipe)
    if checkpoints:
        command = shlex.join(["thinwire", "train", "--resume", str(recipe.folder)])
        return f"the newest checkpoint is that of step {checkpoints[-1].step}; {command} goes on from there"
    if weights is None and is_empty(recipe.folder / "metrics.jsonl"):
        return ""
    if weights is not None:
        kept = f", but for the weights of step {weights.step} in {recipe.folder / 'weights'}"
    why = (
        f"no checkpoint was complete yet (checkpoint.every is {recipe.checkpoint.every!r})"
        if recipe.checkpoint.wanted
        else "the recipe asks for no checkpoints"
    )
    before = f"; the run before this one is in {replaced}{also}; move it away to keep it" if replaced.is_dir() else ""
    return f"what was trained is lost{kept}: {why}; --checkpoint.every '100 steps' keeps more of the next run{before}"


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


def _replacing(folder: Path, checkpoints: Path, resume: str) -> str | None:
    if said := _foreign(folder):
        return said[0]
    if resume != "auto" or has_manifests(checkpoints) or not _holds_run(folder):
        return None
    resuming, own = f"--resume {folder} is not possible, because the run has no checkpoint", folder / "checkpoints"
    with suppress(OSError, ValueError, TypeError, KeyError):  # its recipe is missing or damaged
        recipe = load_yaml(read_text(folder / "recipe.yaml"), str(folder))
        own = Path(recipe["checkpoint"]["folder"] or own)
    if has_manifests(own):
        resuming = f"--resume {folder} goes on from its checkpoints, which are in {own}, not in {checkpoints}"
    return (
        f"output must name a folder without a run, but {folder} holds one; --overwrite replaces it, --output DIR keeps "
        f"both; {resuming}"
    )


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

    A run takes the checkpoints that it finds there for its own, even where it saves none. Two at once removed each
    other's.
    """
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
    try:
        while True:
            try:
                return scratch.lock(folder, alone=alone)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK_SECONDS)
    except BlockingIOError as error:
        raise OptionsError(
            f"{field} must name a folder that no other run uses, but a run writes to {folder} now; wait until it has "
            f"ended, or name another --{field}"
        ) from error


def departed(recipe: Recipe, descriptor: int) -> str | None:
    """A sentence that says why a run cannot be started again, if its folder has left its place; else None."""
    with suppress(OSError):
        if os.path.samestat(os.fstat(descriptor), recipe.folder.stat()):
            return None
    if has_manifests(checkpoint_folder(recipe)):  # the run has made it anew
        return None
    return (
        f"{recipe.folder} must stay in its place while a run writes to it, and was moved or removed; move it back, and "
        f"give the same command again: a run that goes on now would start from step 0"
    )


def _holds_run(folder: Path) -> bool:
    """Whether the folder has results of a run. A run that failed before its first step has none."""
    return not is_empty(folder / "metrics.jsonl") or (folder / "summary.json").is_file() or newest(folder) is not None


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
