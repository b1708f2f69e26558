"""The data of a run, read and tokenized once a host where its processes are not forked: the others map one file.

Under torchrun each process is a new interpreter, and so are the stages of a launcher that may not be forked. The first
process that needs the data reads it and writes the file; the others wait for it. All of them map the same pages. The
file is in a private folder of the launcher or of torchrun. It is removed once all processes have opened it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch

from thinwire.launch.plan.places import real_placement
from thinwire.launch.recipe.recipe import Recipe
from thinwire.launch.shared import scratch, variables
from thinwire.launch.shared.rank import processes_of_host
from thinwire.models.data.clients import JoinedSamples, join
from thinwire.models.data.load import load
from thinwire.models.data.options import DataOptions
from thinwire.models.data.outline import read_outline
from thinwire.models.data.samples import Data
from thinwire.models.errors import require
from thinwire.models.tasks import own_task

_PREFIX = "data-"


def load_once(options: DataOptions, seed: int) -> Data:
    """The data as `load` returns it; where several processes of this host want it, one of them reads it.

    Raises:
        ModelError: as `load`.
    """
    folder = _folder()
    if folder is None:
        return load(options, seed=seed)
    with _alone(folder):
        if (found := _read(folder / _name(options, seed))) is not None:
            return found
        data = load(options, seed=seed)
        keep(data, options, seed, folder)
        return data


def data_of(recipe: Recipe, rank: int | None, given: Data | None) -> Data:
    """The data of a run, unless they are given, with the loss and metrics of the user's own.

    Raises:
        ModelError: the data cannot be read; a file is no outline, or has no labels although this process computes the
            loss; the clients do not fit together; or there is no such loss, metric or best score.
    """
    data, training = given or _found(recipe, rank), recipe.training
    task = own_task(data.task, training.loss, training.metrics)
    known, best = ("loss", *task.scores), training.best
    require(
        (
            best is None or (data.held_out is not None and best.split()[1] in known),
            f"training.best must be min or max of {', '.join(known)}, and needs held-out data, got {best!r}",
        )
    )
    return replace(data, task=task)


def _found(recipe: Recipe, rank: int | None) -> Data:
    """The data, read, or where they are elsewhere, from outlines.

    A process reads outlines in place of the data if the recipe names any and it has no first stage. A launcher has no
    rank, and reads the data for all its processes. Stage processes of a host share what one of them reads. Clients with
    data of their own are joined.
    """
    read = load if rank is None else load_once
    outlined = recipe.data.outline is not None or bool(recipe.clients.outlines)
    reads = not outlined or rank is None or _has_stage(recipe, rank, 0)
    own = read(recipe.data, seed=recipe.training.seed) if reads else None
    if own is not None and isinstance(own.training, JoinedSamples):
        return own  # a launcher has joined them
    if not recipe.clients.outlines:
        return own or _outlined(recipe, labels=_has_loss(recipe, rank))
    require(
        (
            recipe.data.outline is None,
            "data.outline must be left out beside clients.outlines, which describe all clients",
        ),
        (
            bool(recipe.data.mean) or "mean" not in recipe.data.chosen_kind.uses,
            "clients with data of their own need data.mean and data.std, because each would measure other pixels",
        ),
    )
    labels = own is None and _has_loss(recipe, rank)
    paths = recipe.clients.outlines
    return join([read_outline(path, labels=labels, option="each of clients.outlines") for path in paths], own)


def _outlined(recipe: Recipe, *, labels: bool) -> Data:
    """The data of data.outline. ModelError if it is of images with other channels than the recipe says."""
    path, wanted = str(recipe.data.outline), recipe.data.channels
    data = read_outline(path, labels=labels)
    channels = data.training.example(1).shape[1:2]
    fits = wanted is None or channels == (wanted,)
    told = f"data.outline must be of images with as many channels as data.channels, {wanted}, got {list(channels)}"
    require((fits, f"{told} in {path}; write it anew with thinwire outline"))
    return data


def _has_loss(recipe: Recipe, rank: int | None) -> bool:
    """Whether this process has the last stage, as far as it has a rank."""
    return rank is not None and _has_stage(recipe, rank, recipe.pipeline.num_stages - 1)


def _has_stage(recipe: Recipe, rank: int, stage: int) -> bool:
    return stage in real_placement(recipe, rank).stages_of(rank)


def keep(data: Data, options: DataOptions, seed: int, folder: Path) -> None:
    """Write data that was read for the other processes of this host; without room for it, each reads its own."""
    fresh = folder / f"{uuid.uuid4().hex}.part"
    try:
        torch.save(data, fresh)
        fresh.replace(folder / _name(options, seed))
    except Exception:  # whatever a source of one's own cannot pickle
        fresh.unlink(missing_ok=True)


def discard() -> None:
    """Remove the file, which processes that have opened it keep; call it once all have."""
    folder = _folder()
    for path in folder.glob(f"{_PREFIX}*") if folder is not None else ():
        path.unlink(missing_ok=True)


def _folder() -> Path | None:
    """The folder that the processes of this host share, which nobody else can write to; None where there is none."""
    if processes_of_host() < 2:
        return None
    if variables.FAILURES in os.environ:
        return Path(os.environ[variables.FAILURES])
    with suppress(OSError):
        return scratch.of_parent()
    return None


def _name(options: DataOptions, seed: int) -> str:
    """A name that differs where the data would."""
    told = json.dumps([asdict(options), seed, str(Path.cwd())], sort_keys=True)
    return _PREFIX + hashlib.sha256(told.encode()).hexdigest()


def _read(path: Path) -> Data | None:
    """The data in a file; None if there is none that can be read."""
    try:
        # a private folder: what lies there was pickled by a process of this run
        found = torch.load(path, mmap=True, weights_only=False)
    except Exception:  # also what the classes of a source of one's own raise
        return None
    return found if isinstance(found, Data) else None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Inside, no other process of this host is; on a file system without locks, they may be."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
