"""Checkpoints: all that a run needs to go on as if it had never stopped. They are written while training goes on.

FOLDER/
  step-00000500/
    manifest.json     the digest of every file of every stage
    stage-0/          what that stage alone knows
      model-00001-of-00001.safetensors    weights, optimizer and small state; torch.distributed.checkpoint reads it
      values.json     counters
      NAME.00000500.rows                  the rows of a store that changed since the checkpoint before
      NAME.00000400.rows                  a link to rows that an older checkpoint wrote (`rows.py`)

The order keeps a checkpoint complete:

1. Every process takes its state between two steps.
2. A thread writes it, waits until it is on disk, and posts its digests. What it has not begun to write when the next
   step changes the weights is copied first.
3. A process that has seen the digests of all stages writes the manifest, under another name first.
4. The oldest checkpoint is removed.

So a folder with a manifest is complete, and one without is ignored. Reading a checkpoint runs no code:
it is safetensors, JSON and plain rows. Every `step-` has the mark of its run (`compress/stores/marks.py`), and without
that mark nothing is replaced or removed.

The weights that a run saves are a checkpoint with nothing else in it, in a folder of their own. They are written to
`new-00000500`, which is renamed when it is whole.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor

from thinwire.compress.stores.durable import make_folder, sync, write_durably
from thinwire.compress.stores.marks import claim, erase, remove, run_of
from thinwire.compress.stores.store import Snapshot, Store
from thinwire.errors.files import MARK, opened
from thinwire.models.checkpoint import WEIGHTS
from thinwire.pipeline.errors import CheckpointError, WireError
from thinwire.pipeline.processes import posts
from thinwire.pipeline.saving.checkpoint_folder import (
    DIGEST,
    MANIFEST,
    NEW,
    TENSORS,
    VALUES,
    Manifest,
    SavedStage,
    digest_of,
    manifests,
    step_folder,
    step_of,
    steps_of,
)
from thinwire.pipeline.saving.rows import ROWS, file_of, link, restore, steps_in, table_of

_POLL_SECONDS = 0.02
_PIECE = 2**18
_NICENESS = 10
"""How far behind training the thread that writes stands in the system's scheduler."""


@dataclass(frozen=True, eq=False)
class StageState:
    """The state of one stage for a checkpoint: copies, or what the training lends until its next step."""

    tensors: dict[str, Tensor]
    values: Mapping[str, Any]
    """JSON values."""
    snapshots: Mapping[str, tuple[Store, Snapshot]]
    """The stores of feedback by name."""
    lent: bool = False
    """Whether the training changes these tensors after it has called `release`."""


@dataclass(frozen=True, eq=False)
class _Part:
    """What a stage has in a checkpoint that is whole."""

    path: Path = Path()
    digests: Mapping[str, str] = field(default_factory=dict)
    """Of its files, by name."""
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    """Of its stores, by name: where their rows are, as in `rows.py`."""
    stores: Sequence[Store] = ()

    @property
    def lacks_rows(self) -> bool:
        """Whether somebody has removed a file of rows."""
        return any(name.endswith(ROWS) and not (self.path / name).exists() for name in self.digests)


@dataclass(eq=False)
class Checkpoints:
    """The checkpoints of a run, as one process writes them."""

    folder: Path
    """Where they are kept, on this host or shared by several."""
    _: KW_ONLY
    stages: Sequence[int]
    """The stages of this process."""
    num_stages: int
    """Those of the pipeline."""
    keep: int
    """How many checkpoints stay."""
    header: Mapping[str, Any]
    """The settings of the run for the manifest, as JSON values."""
    words: dist.Store
    """Where processes post what they have written."""
    runs: Sequence[str] = ("",)
    """The ids that the folders of this run have on its hosts; folders get the first."""
    timeout: float = 300.0
    """Seconds to wait for the other processes."""

    def __post_init__(self) -> None:
        self._last: dict[int, _Part] = {}
        self._posted: set[str] = set()
        self._lent: dict[int, StageState] = {}
        self._taking = threading.Lock()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._all_wrote: int | None = None  # the newest step whose parts all stages are known to have written

    def save(
        self,
        step: int,
        collect: Callable[[], Mapping[int, StageState]],
        logged: Callable[[], None] = lambda: None,
        *,
        trains: bool = True,
    ) -> None:
        """Wait until the checkpoint before is complete, take the state of the stages, and write it during training.

        Args:
            step: optimizer steps done.
            collect: takes the state of the stages.
            logged: waits until other files that the checkpoint needs are on their disks; called on another thread.
            trains: whether training goes on meanwhile, and comes first where the processor is busy.

        Raises:
            CheckpointError: the checkpoint before could not be written.
        """
        self.wait()
        for stage, part in [(stage, part) for stage, part in self._last.items() if part.lacks_rows]:
            del self._last[stage]  # somebody made room by hand: the next checkpoint writes all rows
            for store in part.stores:
                store.unsave_all()
        states = collect()
        self._lent = {stage: state for stage, state in states.items() if state.lent}
        self._thread = threading.Thread(
            target=self._run, args=(step, states, logged, trains), name=f"checkpoint {step}"
        )
        self._thread.start()

    def release(self) -> None:
        """Copy what was lent and is not written yet: it may change from now on. Waits for what is being written."""
        with self._taking:
            for state in self._lent.values():
                state.tensors.update({name: tensor.clone() for name, tensor in state.tensors.items()})
            self._lent = {}

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

    def finish_writing(self, seconds: float) -> None:
        """Wait so long at most until the checkpoint that is being written is complete, or has failed: the run ends."""
        if self._thread is not None:
            self._thread.join(seconds)

    def check(self) -> None:
        """Raise CheckpointError if the checkpoint that is being written has failed already. Waits for nothing."""
        if self._failure is not None:
            self.wait()

    def resume(self, manifest: Manifest, stage: int, stores: Mapping[str, Store]) -> SavedStage:
        """Read what a stage saved, and restore its stores. Later checkpoints are removed.

        Raises:
            CheckpointError, StoreError: a file is missing or damaged.
        """
        self.go_on_from(manifest)
        saved = SavedStage(self.folder, manifest.step, stage)
        tables = {name: restore(saved, name, store) for name, store in stores.items()}
        self._last[stage] = _Part(saved.path, manifest.files[str(stage)], tables, list(stores.values()))
        return saved

    def go_on_from(self, manifest: Manifest) -> None:
        """Remove later checkpoints. The checkpoint itself stays until a newer one is complete.

        The checkpoint is of the run that goes on, also where the folder of the run is a new one.
        """
        place = step_folder(self.folder, manifest.step) / MANIFEST
        if (run := run_of(place.parent)) is not None:
            self.runs = [*self.runs, run]
        # other hosts wrote it; this host stopped before it did, or its own is damaged
        if not any(found.step == manifest.step for found in manifests(self.folder)):
            claim(place.parent, self.runs[0])
            if place.is_dir():
                shutil.rmtree(place)
            write_durably(place, manifest.text().encode())
        self.discard_after(manifest.step)

    def discard_after(self, step: int) -> None:
        """Delete what this run wrote after a step, in any stage, and unfinished files from before it.

        Call it before the first step: until every process has, none can write a checkpoint.
        """
        for path in self._own_steps():
            if step_of(path) > step or not (path / MANIFEST).exists():
                self._discard(path)

    def _run(self, step: int, states: Mapping[int, StageState], logged: Callable[[], None], trains: bool) -> None:
        if trains and sys.platform == "linux":  # which has a priority for each thread
            with suppress(OSError):  # where a sandbox forbids it, the checkpoint is written all the same
                os.nice(_NICENESS)
        try:
            logged()
            self._write(step, states)
        except Exception as error:
            self._failure = error
            with self._taking:
                self._lent = {}
            for stage, state in states.items():
                for store, snapshot in state.snapshots.values():
                    store.unsave(snapshot)
                with suppress(Exception):  # no room for words either, or no place for them; the others wait in vain
                    self._post(step, stage, {"failed": _reason(error)})
            # on a full disk this frees room; but what all stages have written, another process may complete
            target = step_folder(self.folder, step)
            if self._all_wrote != step and not (target / MANIFEST).exists() and run_of(target) in self.runs:
                for stage in states:  # the folder above stays: another process may be about to write its part there
                    shutil.rmtree(target / f"stage-{stage}", ignore_errors=True)

    def _write(self, step: int, states: Mapping[int, StageState]) -> None:
        target = step_folder(self.folder, step)
        if run_of(target) not in (None, *self.runs):
            said = f"another run made {target}; give each run a checkpoint.folder of its own"
            raise OSError(errno.EEXIST, said, str(target))
        claim(target, self.runs[0])
        parts = dict[int, _Part]()
        for stage, state in states.items():
            parts[stage] = self._write_stage(target / f"stage-{stage}", step, stage, state)
            self._post(step, stage, {"files": parts[stage].digests})
        manifest = Manifest(step, self.header, self._await_everyone(step))
        self._all_wrote = step
        # all have read the words of the checkpoint before, which else would fill the store, in memory and in its file
        for key in self._posted - (now := {_key(step, stage) for stage in self.stages}):
            self.words.delete_key(key)
        self._posted = now
        write_durably(target / MANIFEST, manifest.text().encode())
        self._last |= parts
        for path in [path for path in self._own_steps() if (path / MANIFEST).exists()][: -self.keep]:
            self._discard(path)

    def _write_stage(self, folder: Path, step: int, stage: int, state: StageState) -> _Part:
        """Write one stage's files, with links to older rows, and wait until they are on disk."""
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that stopped while it wrote
        make_folder(folder)
        before, digests, tables = self._last.get(stage, _Part()), dict[str, str](), dict[str, Tensor]()
        for name, (store, snapshot) in state.snapshots.items():
            table = before.tables[name].clone() if name in before.tables else table_of(store.layout.num_slots)
            if snapshot.slots:
                rows = (row.numpy().data for row in snapshot.rows)
                digests[file_of(name, step)] = _write_hashed(folder / file_of(name, step), rows)
                table[snapshot.slots] = torch.tensor([[step, place] for place in range(len(snapshot.slots))])
            for older in (file_of(name, each) for each in steps_in(table) if each != step):
                link(before.path / older, folder / older)
                digests[older] = before.digests[older]
            tables[name] = table
        with self._taking:
            of_stores = {f"stores/{name}/rows": table for name, table in tables.items()}
            digests[TENSORS] = write_tensors(folder / TENSORS, state.tensors | of_stores)
            self._lent.pop(stage, None)
        stores = [store for store, _ in state.snapshots.values()]
        return _Part(folder, _complete_part(folder, state.values, digests), tables, stores)

    def _post(self, step: int, stage: int, word: Mapping[str, Any]) -> None:
        self.words.set(_key(step, stage), posts.written(word))
        self._posted.add(_key(step, stage))

    def _await_everyone(self, step: int) -> dict[str, dict[str, str]]:
        """The digests of every stage's files, after all are written. CheckpointError if a stage could not write."""
        keys = [_key(step, stage) for stage in range(self.num_stages)]
        deadline = time.monotonic() + self.timeout
        # poll: a blocking wait would block the other threads on the same connection
        while not self.words.check(keys):
            if time.monotonic() > deadline:
                raise CheckpointError(f"not every stage had written its part within {self.timeout:g} s")
            time.sleep(_POLL_SECONDS)
        return {str(stage): _files_of(self.words.get(key), stage) for stage, key in enumerate(keys)}

    def _own_steps(self) -> list[Path]:
        """The folders of checkpoints that this run made, whole or not, the oldest first."""
        return [path for path in steps_of(self.folder) if run_of(path) in self.runs]

    def _discard(self, path: Path) -> None:
        """Remove a checkpoint, its manifest first. Other processes may do so as well."""
        erase(path / MANIFEST)
        remove(path, self.runs)


class WeightsCheckpoint:
    """A checkpoint of weights only, as one process writes it. It takes the place of the one before in its folder."""

    def __init__(self, folder: Path, step: int, run: str) -> None:
        self.folder, self._step, self._run = folder, step, run
        self._new = folder / f"{NEW}{step:08d}"

    def write(self, stage: int, weights: Mapping[str, Tensor], values: Mapping[str, Any]) -> dict[str, str]:
        """Write one stage's weights, named as in the unsplit model, and JSON values; the digests of the files by name.

        OSError if the disk has no room.
        """
        claim(self.folder, self._run)
        claim(self._new, self._run)
        (self._new / MANIFEST).unlink(missing_ok=True)  # of a process that was killed before it gave it its name
        part = self._new / f"stage-{stage}"
        shutil.rmtree(part, ignore_errors=True)
        make_folder(part)
        digest = write_tensors(part / TENSORS, {f"{WEIGHTS}{name}": tensor for name, tensor in weights.items()})
        return _complete_part(part, values, {TENSORS: digest})

    def complete(self, files: Mapping[str, Mapping[str, str]]) -> None:
        """Write the manifest, with the digests of all stages, and remove those before. All have written.

        Whoever is killed meanwhile leaves whole weights, maybe under the name that they had before they were whole.
        """
        manifest = Manifest(self._step, {"weights_only": True}, files)
        with opened(self.folder / MARK) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not self._new.is_dir():  # another process on this disk was first
                return
            for part in self._new.glob("stage-*"):  # of a process that was killed, with more stages
                if part.name.removeprefix("stage-") not in files:
                    shutil.rmtree(part, ignore_errors=True)
            write_durably(self._new / MANIFEST, manifest.text().encode())
            path = step_folder(self.folder, self._step)
            remove(path)
            self._new.rename(path)
            sync(self.folder)
            for other in chain(steps_of(self.folder), self.folder.glob(f"{NEW}*")):
                if other != path:
                    remove(other)

    def discard(self) -> None:
        """Remove a checkpoint that cannot be completed."""
        remove(self._new)


def _complete_part(folder: Path, values: Mapping[str, Any], digests: Mapping[str, str]) -> dict[str, str]:
    """Write the values beside the tensors of one stage, and wait until all is on the disk; digests by name of a file.

    `digests` has those that are known.
    """
    sync(folder)
    write_durably(folder / VALUES, json.dumps(values).encode())
    return {path.name: digests.get(path.name) or digest_of(path) for path in sorted(folder.iterdir())}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors as a safetensors file, as `_write_hashed` does.

    The writer of safetensors takes whole tensors, for which Linux may need several times as long, and its file would
    be read again; that of torch.distributed.checkpoint keeps Python's lock (the GIL) for seconds a gigabyte, so that
    the stage would neither train nor beat.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # so that all lie at multiples of it
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _name_of(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = memoryview(len(text).to_bytes(8, "little") + text)
    return _write_hashed(path, chain([head], (_bytes_of(tensor) for _, tensor in ordered)))


def _write_hashed(path: Path, content: Iterable[memoryview]) -> str:
    """Write a file, and wait until it is on the disk; its digest, as `digest_of` reads it.

    It is hashed while it is written, in pieces of 256 KiB.
    """
    hashed = DIGEST()
    with path.open("wb", buffering=0) as file:
        for whole in content:
            for begin in range(0, len(whole), _PIECE):
                piece = whole[begin : begin + _PIECE]
                hashed.update(piece)
                while piece:  # a disk that fills up takes a part
                    piece = piece[file.write(piece) :]
        os.fsync(file.fileno())
    return hashed.hexdigest()


@cache
def _name_of(dtype: torch.dtype) -> str:
    """What safetensors calls a dtype: the header of a file of it says so."""
    return str(json.loads(save({"of": torch.empty(0, dtype=dtype)})[8:])["of"]["dtype"])


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in order; its own memory, if that is so on the CPU."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _files_of(text: bytes, stage: int) -> dict[str, str]:
    """The digests of the files that a stage wrote, from what it posted. CheckpointError if it could not write them."""
    must = f"stage {stage} must post what it has written"
    try:
        word: dict[str, Any] = dict(posts.read(text, must))
        if "failed" not in word:
            return {str(name): str(digest) for name, digest in word["files"].items()}
    except WireError as error:
        raise CheckpointError(str(error)) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{must}, and posted something else") from error
    raise CheckpointError(f"stage {stage}: {word['failed']}")


def _reason(error: BaseException) -> str:
    """What went wrong, without the number that the system gives it."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _key(step: int, stage: int) -> str:
    return f"checkpoint/{step}/{stage}"
