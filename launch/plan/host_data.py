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
from dataclasses import asdict
from pathlib import Path

import torch

from thinwire.launch.shared import scratch, variables
from thinwire.launch.shared.rank import processes_of_host
from thinwire.models.data.load import load
from thinwire.models.data.options import DataOptions
from thinwire.models.data.samples import Data

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
