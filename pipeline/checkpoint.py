"""Checkpoints: all that a run needs to go on as if it had never stopped. They are written while training goes on.

FOLDER/
  step-00000500/
    manifest.json     the digest of every file of every stage
    stage-0/          what that stage alone knows
      model-00001-of-00001.safetensors    weights, optimizer and small state; torch.distributed.checkpoint reads it
      values.json     counters
      NAME.rows, NAME.slots               the rows of a store that changed since the checkpoint before
  base/stage-0/NAME.slots                 the rows of checkpoints that are gone

The order keeps a checkpoint complete:

1. Every process copies its state between two steps.
2. A thread writes the copy, waits until it is on disk, and posts its digests.
3. A process that has seen the digests of all stages writes the manifest, under another name first.
4. The checkpoint before is removed.

So a folder with a manifest is complete, and one without is ignored. Reading a checkpoint runs no code:
it is safetensors, JSON and plain rows.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from thinwire.compress.stores.durable import make_folder, sync
from thinwire.compress.stores.saved import SavedRows, fold, restored
from thinwire.compress.stores.store import Snapshot, Store
from thinwire.models.file_mode import follow_umask
from thinwire.pipeline.errors import CheckpointError
from thinwire.pipeline.manifest import Manifest

_MANIFEST, _RETIRED = "manifest.json", "retired.json"
_TENSORS = "model-00001-of-00001.safetensors"
_POLL_SECONDS = 0.02


@dataclass(frozen=True, eq=False)
class StageState:
    """The state of one stage for a checkpoint: copies, which training does not change."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]
    """JSON values."""
    snapshots: Mapping[str, tuple[Store, Snapshot]]
    """The stores of feedback by name."""


class Checkpoints:
    """The checkpoints of a run, as one process writes them.

    Args:
        folder: where they are kept, on this host or shared by several.
        stages: the stages of this process.
        num_stages: those of the pipeline.
        keep: how many checkpoints stay.
        header: the settings of the run for the manifest, as JSON values.
        words: the store where processes post what they have written.
        timeout: seconds to wait for the other processes.
    """

    def __init__(
        self,
        folder: Path,
        *,
        stages: Sequence[int],
        num_stages: int,
        keep: int,
        header: Mapping[str, Any],
        words: dist.Store,
        timeout: float = 300.0,
    ) -> None:
        self.folder, self._stages, self._keep, self._header = folder, list(stages), keep, dict(header)
        self._words, self._timeout = words, timeout
        self._everyone = range(num_stages)
        self._checksums: dict[tuple[int, str], Tensor] = {}
        self._posted: set[str] = set()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def save(
        self, step: int, collect: Callable[[], Mapping[int, StageState]], logged: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until the checkpoint before is complete, copy the state of the stages, and write it during training.

        Args:
            step: optimizer steps done.
            collect: copies the state of the stages.
            logged: waits until other files that the checkpoint needs are on their disks; called on another thread.

        Raises:
            CheckpointError: the checkpoint before could not be written.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(step, collect(), logged), name=f"checkpoint {step}")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint is complete. CheckpointError if it could not be written; earlier ones stay."""
        if self._thread is None:
            return
        self._thread.join()
        name, self._thread = self._thread.name, None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise CheckpointError(
                f"{name} could not be written to {self.folder}: {_reason(failure)}; fix this, then resume: earlier "
                f"checkpoints are complete"
            ) from failure

    def resume(self, manifest: Manifest, stage: int, stores: Mapping[str, Store]) -> SavedStage:
        """Read what a stage saved, and restore its stores. Later checkpoints of this stage are deleted.

        Raises:
            CheckpointError, StoreError: a file is missing or damaged.
        """
        self.discard_after(manifest.step)
        place = step_folder(self.folder, manifest.step) / _MANIFEST
        if not place.exists():  # other hosts wrote it; this host stopped before it did
            _write_durably(place, manifest.text().encode())
        saved = SavedStage(self.folder, manifest.step, stage)
        for name, store in stores.items():
            self._checksums[stage, name] = saved.restore(name, store)
        return saved

    def discard_after(self, step: int) -> None:
        """Delete files that this process's stages wrote after a step, and unfinished files from before it."""
        for path in _steps(self.folder):
            if _step_of(path) > step or (not (path / _MANIFEST).exists() and not (path / _RETIRED).exists()):
                _remove(path / _MANIFEST)
                self._delete(path)

    def _run(self, step: int, states: Mapping[int, StageState], logged: Callable[[], None]) -> None:
        try:
            logged()
            self._write(step, states)
        except Exception as error:
            self._failure = error
            for stage, state in states.items():
                for store, snapshot in state.snapshots.values():
                    store.unsave(snapshot)
                self._post(step, stage, {"failed": _reason(error)})
            if not (step_folder(self.folder, step) / _MANIFEST).exists():
                self._delete(step_folder(self.folder, step))  # on a full disk this frees room for the next checkpoint

    def _write(self, step: int, states: Mapping[int, StageState]) -> None:
        target = step_folder(self.folder, step)
        for stage, state in states.items():
            self._post(step, stage, {"files": self._write_stage(target / f"stage-{stage}", stage, state)})
        manifest = Manifest(step, self._header, self._await_everyone(step))
        self._forget_words_before(step)
        _write_durably(target / _MANIFEST, manifest.text().encode())
        self._prune()

    def _write_stage(self, folder: Path, stage: int, state: StageState) -> dict[str, str]:
        """Write one stage's files and wait until they are on disk; their digests by name."""
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that stopped while it wrote
        make_folder(folder)
        tensors, digests = dict(state.tensors), dict[str, str]()
        for name, (store, snapshot) in state.snapshots.items():
            empty = torch.zeros(store.layout.num_slots, dtype=torch.int64)
            checksums = self._checksums.setdefault((stage, name), empty)
            _, digests[f"{name}.rows"] = SavedRows.write(folder / f"{name}.rows", snapshot, checksums)
            _write_durably(folder / f"{name}.slots", np.asarray(snapshot.slots, np.int64).tobytes())
            tensors |= {f"stores/{name}/known": snapshot.known, f"stores/{name}/checksums": checksums}
        _save_tensors(folder, tensors)
        _write_durably(folder / "values.json", json.dumps(state.values).encode())
        return {path.name: digests.get(path.name) or _digest(path) for path in sorted(folder.iterdir())}

    def _post(self, step: int, stage: int, word: Mapping[str, Any]) -> None:
        self._words.set(_key(step, stage), json.dumps(word))
        self._posted.add(_key(step, stage))

    def _forget_words_before(self, step: int) -> None:
        """Delete what this process posted for the checkpoint before: all stages wrote a later one, so all have read it.

        Else the store of words would grow with every checkpoint, in memory and in its file.
        """
        for key in self._posted - (now := {_key(step, stage) for stage in self._stages}):
            self._words.delete_key(key)
        self._posted = now

    def _await_everyone(self, step: int) -> dict[str, dict[str, str]]:
        """The digests of every stage's files, after all are written. CheckpointError if a stage could not write."""
        keys = [_key(step, stage) for stage in self._everyone]
        deadline = time.monotonic() + self._timeout
        # poll: a blocking wait would block the other threads on the same connection
        while not self._words.check(keys):
            if time.monotonic() > deadline:
                raise CheckpointError(f"not every stage had written its part within {self._timeout:g} s")
            time.sleep(_POLL_SECONDS)
        words = [json.loads(self._words.get(key)) for key in keys]
        for stage, word in enumerate(words):
            if "failed" in word:
                raise CheckpointError(f"stage {stage}: {word['failed']}")
        return {str(stage): word["files"] for stage, word in enumerate(words)}

    def _prune(self) -> None:
        """Fold all but the newest checkpoints into the base, and delete them."""
        whole = [path for path in _steps(self.folder) if (path / _MANIFEST).exists()]
        # retire before folding: a process that stops in between leaves a name that says to fold again
        for path in whole[: -self._keep]:
            with suppress(FileNotFoundError):  # another process removed it first
                (path / _MANIFEST).rename(path / _RETIRED)
        for path in _steps(self.folder):
            if (path / _RETIRED).exists():
                for stage in self._stages:
                    for saved in _saved_rows(path / f"stage-{stage}"):
                        fold(_base(self.folder, stage, saved.path.stem), saved)
                self._delete(path)

    def _delete(self, path: Path) -> None:
        """Delete the parts of this process's stages, and the folder behind the last part."""
        for stage in self._stages:
            shutil.rmtree(path / f"stage-{stage}", ignore_errors=True)
        if not any(path.glob("stage-*")):
            shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class SavedStage:
    """One stage's part of a checkpoint, read on demand."""

    folder: Path
    """That of all checkpoints."""
    step: int
    stage: int

    @property
    def path(self) -> Path:
        """The stage's own folder."""
        return step_folder(self.folder, self.step) / f"stage-{self.stage}"

    @property
    def values(self) -> dict[str, Any]:
        """The JSON values."""
        with _reading(self.path):
            found: dict[str, Any] = json.loads((self.path / "values.json").read_text())
        return found

    def names(self, prefix: str) -> list[str]:
        """The names of the tensors that begin with a prefix, without it."""
        with _reading(self.path), safe_open(self.path / _TENSORS, framework="pt") as opened:
            return [name.removeprefix(prefix) for name in opened.keys() if name.startswith(prefix)]  # noqa: SIM118

    def tensors(self, prefix: str, wanted: Container[str] | None = None) -> dict[str, Tensor]:
        """The tensors whose names begin with a prefix, by the rest of their names; those wanted, or all."""
        names = [name for name in self.names(prefix) if wanted is None or name in wanted]
        with _reading(self.path), safe_open(self.path / _TENSORS, framework="pt") as opened:
            return {name: opened.get_tensor(prefix + name) for name in names}

    def restore(self, name: str, store: Store) -> Tensor:
        """Give a store its rows; their checksums, int64 [num_slots]. StoreError where a row is damaged."""
        tables = self.tensors(f"stores/{name}/")
        if tables.keys() != {"known", "checksums"} or len(tables["known"]) != store.layout.num_slots:
            raise CheckpointError(f"{self.path} holds no store {name} of {store.layout.num_slots} slots")
        chain = [
            saved
            for path in _steps(self.folder)
            if _step_of(path) <= self.step and ((path / _MANIFEST).exists() or (path / _RETIRED).exists())
            for saved in _saved_rows(path / f"stage-{self.stage}")
            if saved.path.stem == name
        ]
        base = _base(self.folder, self.stage, name)
        store.restore(tables["known"], restored(store.layout, tables["known"], tables["checksums"], base, chain))
        return tables["checksums"]


def manifests(folder: Path) -> list[Manifest]:
    """The manifests that can be read in a folder, the oldest first."""
    return [manifest for path in _steps(folder) if (manifest := _readable(path)) is not None]


def has_manifests(folder: Path) -> bool:
    """Whether a folder has the manifest of any checkpoint, even a damaged one."""
    return any((path / _MANIFEST).exists() for path in _steps(folder))


def is_whole(folder: Path, manifest: Manifest, stages: Sequence[int]) -> bool:
    """Whether a folder has the parts of some stages, unchanged."""
    place = step_folder(folder, manifest.step)
    return all(_as_written(place / f"stage-{stage}", manifest, stage) for stage in stages)


def step_folder(folder: Path, step: int) -> Path:
    """The folder of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def _readable(path: Path) -> Manifest | None:
    try:
        manifest = Manifest.parse((path / _MANIFEST).read_text(), str(path / _MANIFEST))
    except (OSError, ValueError, CheckpointError):
        return None
    return manifest if manifest.step == _step_of(path) else None


def _as_written(part: Path, manifest: Manifest, stage: int) -> bool:
    files = manifest.files.get(str(stage), {})
    return bool(files) and all((part / name).is_file() and _digest(part / name) == sum for name, sum in files.items())


def _remove(path: Path) -> None:
    """Remove a file, or a folder that stands in its place."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _steps(folder: Path) -> list[Path]:
    """The folders of checkpoints, whole or not, the oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal())


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _base(folder: Path, stage: int, name: str) -> Path:
    return folder / "base" / f"stage-{stage}" / f"{name}.slots"


def _saved_rows(part: Path) -> Iterator[SavedRows]:
    """The rows in one stage's part. Of a part that is being deleted, half of a pair may be left: the base has its rows.

    Where the base has not, a row differs from its checksum.
    """
    for path in sorted(part.glob("*.rows")):
        slots = path.with_suffix(".slots")
        if slots.exists():
            with _reading(part):
                yield SavedRows(path, np.fromfile(slots, np.int64).tolist())


def _save_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors, as torch.distributed.checkpoint would, and wait until the disk has them.

    Its own writer keeps Python's lock (the GIL) for seconds a gigabyte: the stage would neither train nor beat.
    """
    path = folder / _TENSORS
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    follow_umask(path)
    sync(path)
    sync(folder)


def _write_durably(path: Path, content: bytes) -> None:
    """Write a file completely or not at all."""
    fresh = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")  # other processes may write the same file
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync(path.parent)  # the new name must reach the disk too


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(error: BaseException) -> str:
    """What went wrong, without the number that the system gives it."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _key(step: int, stage: int) -> str:
    return f"checkpoint/{step}/{stage}"


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; take another checkpoint") from error
