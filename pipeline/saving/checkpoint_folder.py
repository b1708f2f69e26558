"""The folder of checkpoints: where files lie, the manifest, which checkpoints are whole, and one stage's part.

`checkpoint.py` says what the files are. Whether there are any is asked before a training is imported.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from safetensors import SafetensorError, safe_open

from thinwire.compress.stores.marks import remove, stray
from thinwire.errors import ThinwireError
from thinwire.errors.files import as_written, check_regular, opened, read_object, read_text
from thinwire.pipeline.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from thinwire.compress.stores.saved import SavedRows
    from thinwire.compress.stores.store import Store

MANIFEST, RETIRED = "manifest.json", "retired.json"
"""The name of a manifest, and its name once its checkpoint is retired: only rows of stores stay of it."""
NEW = "new-"
"""How the name of a checkpoint of weights begins until it is whole."""
MOST_RETIRED = 64
"""Parts of a stage in retired checkpoints; if there are more, the oldest are folded into the base."""
MANIFEST_FORMAT = 3
DIGEST = xxhash.xxh3_128
"""It tells damage, not an attack, and takes a tenth of the time of SHA-256."""
_STEP = re.compile(r"step-[0-9]{8,18}")
TENSORS, VALUES = "model-00001-of-00001.safetensors", "values.json"


@dataclass(frozen=True)
class Manifest:
    """The manifest of a complete checkpoint."""

    step: int
    """Optimizer steps that were done."""
    header: Mapping[str, Any]
    """The settings that made it, as JSON values."""
    files: Mapping[str, Mapping[str, str]]
    """For each stage, "0" the first, the digests of its files by name."""
    format: int = MANIFEST_FORMAT

    @property
    def cut(self) -> object:
        """The layers of each stage, as a JSON value; None if the header does not say."""
        return self.header.get("cuts")

    @property
    def parts(self) -> list[int]:
        """All parts, in order."""
        return sorted(map(int, self.files))

    @property
    def model_parts(self) -> list[int]:
        """The parts that hold the whole model. Of parts with the same layers, as replicas have, the first is enough."""
        parts, cuts = self.parts, self.cut
        if not isinstance(cuts, list) or len(cuts) != len(parts):
            return parts
        return [part for part in parts if cuts[part] not in cuts[:part]]

    @classmethod
    def parse(cls, text: str, where: str) -> Manifest:
        """The manifest in a text from `where`. CheckpointError if it is not one of this release, or is damaged."""
        try:
            values = json.loads(text)
            digest = values.pop("digest")
            manifest = cls(**values)
            _check_fields(manifest)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{where} is not the manifest of a checkpoint: {error!r}") from error
        if digest != _digest_of(values):
            raise CheckpointError(f"{where} is damaged: it has not the digest that it names")
        return manifest

    def text(self) -> str:
        """The manifest as JSON, with its own digest."""
        values = asdict(self)
        return json.dumps({**values, "digest": _digest_of(values)}, indent=1)


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
        with reading(self.path):
            return read_object(self.path / VALUES)

    def names(self, prefix: str) -> list[str]:
        """The names of the tensors that begin with a prefix, without it."""
        with self._tensors() as file:
            return [name.removeprefix(prefix) for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118

    def tensors(self, prefix: str, wanted: Container[str] | None = None) -> dict[str, Tensor]:
        """The tensors whose names begin with a prefix, by the rest of their names; those wanted, or all."""
        names = [name for name in self.names(prefix) if wanted is None or name in wanted]
        with self._tensors() as file:
            return {name: file.get_tensor(prefix + name) for name in names}

    @contextmanager
    def _tensors(self) -> Iterator[Any]:
        with reading(self.path):
            check_regular(self.path / TENSORS)
            with safe_open(self.path / TENSORS, framework="pt") as file:
                yield file

    def restore(self, name: str, store: Store) -> Tensor:
        """Give a store its rows; their checksums, int64 [num_slots]. StoreError where a row is damaged."""
        from thinwire.compress.stores.saved import restored

        known, checksums = self._tables(name)
        if len(known) != store.layout.num_slots:
            raise CheckpointError(f"{self.path} holds no store {name} of {store.layout.num_slots} slots")
        chain = [*self._earlier_rows(name, cut_of(step_folder(self.folder, self.step))), *self._own_rows(name)]
        base = base_of(self.folder, self.stage, name)
        store.restore(known, restored(store.layout, known, checksums, base, chain))
        return checksums

    def check_stores(self, cut: object) -> None:
        """Read the rows of all stores that older checkpoints and the base must have for this part of a cut.

        The part itself must be as it was written. CheckpointError or StoreError where a row is missing or damaged.
        """
        from thinwire.compress.stores.saved import check_earlier

        for name in sorted({key.rpartition("/")[0] for key in self.names("stores/")}):
            known, checksums = self._tables(name)
            own = self._own_rows(name)
            if not own:
                raise CheckpointError(f"{self.path} holds no rows of the store {name}")
            base = base_of(self.folder, self.stage, name)
            check_earlier(known, checksums, base, self._earlier_rows(name, cut), own[0])

    def _tables(self, name: str) -> tuple[Tensor, Tensor]:
        """Of a store, which slots are known, and their checksums."""
        tables = self.tensors(f"stores/{name}/")
        if tables.keys() != {"known", "checksums"}:
            raise CheckpointError(f"{self.path} holds no store {name}")
        return tables["known"], tables["checksums"]

    def _own_rows(self, name: str) -> list[SavedRows]:
        return [saved for saved in saved_rows(self.path) if saved.path.stem == name]

    def _earlier_rows(self, name: str, cut: object) -> list[SavedRows]:
        """The rows of a store in older checkpoints of a cut, the oldest first."""
        return [
            saved
            for path in steps_of(self.folder)
            if step_of(path) < self.step and ((path / MANIFEST).exists() or (path / RETIRED).exists())
            if cut_of(path) in (cut, None)  # rows of another cut belong to other boundaries
            for saved in saved_rows(path / f"stage-{self.stage}")
            if saved.path.stem == name
        ]


def manifests(folder: Path) -> list[Manifest]:
    """The manifests that can be read in a folder, the oldest first."""
    return [manifest for path in steps_of(folder) if (manifest := _readable(path)) is not None]


def has_manifests(folder: Path) -> bool:
    """Whether a folder has the manifest of any checkpoint, even a damaged one."""
    return any((path / MANIFEST).exists() for path in steps_of(folder))


def unreadable(folder: Path) -> dict[int, str]:
    """By step, what is wrong with a manifest that cannot be read."""
    return {
        step_of(path): f"{path / MANIFEST} is damaged, or of another release"
        for path in steps_of(folder)
        if (path / MANIFEST).exists() and _readable(path) is None
    }


def trouble(folder: Path, manifest: Manifest, stages: Sequence[int], *, stores: bool = True) -> str | None:
    """What is missing or damaged of the parts of some stages; None if all of it can be restored.

    The rows of stores may be in older checkpoints and in the base. Without `stores` they are not asked for.
    """
    from thinwire.compress.stores.store import StoreError

    for stage in stages:
        part = SavedStage(folder, manifest.step, stage)
        try:
            if (found := _changed(part.path, manifest.files.get(str(stage), {}), stores)) is not None:
                return found
            if stores:
                part.check_stores(manifest.cut)
        except (CheckpointError, StoreError) as error:
            return str(error)
    return None


def passed_over(troubles: Mapping[int, str]) -> list[str]:
    """A sentence for each checkpoint that cannot be taken, by its step: which, and why."""
    return [f"the checkpoint of step {step} is passed over: {said}" for step, said in sorted(troubles.items())]


def step_folder(folder: Path, step: int) -> Path:
    """The folder of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def cut_of(path: Path) -> object:
    """The cut of a checkpoint, also of one that is being removed; None if its manifest is damaged or names none."""
    manifest = _readable(path) or _readable(path, RETIRED)
    return None if manifest is None else manifest.cut


def _readable(path: Path, name: str = MANIFEST) -> Manifest | None:
    try:
        manifest = Manifest.parse(read_text(path / name), str(path / name))
    except (OSError, ValueError, CheckpointError):
        return None
    return manifest if manifest.step == step_of(path) else None


def _changed(part: Path, files: Mapping[str, str], stores: bool) -> str | None:
    """What is wrong with the files of a part; None if they are as they were written. StoreError as `digest_of`."""
    if not files:
        return f"{part} is of a stage that its manifest does not name"
    if (said := stray(part)) is not None:
        return said
    for name, digest in files.items():
        if not stores and Path(name).suffix in (".rows", ".slots"):
            continue
        try:
            if digest_of(part / name) != digest:
                return f"{part / name} is not as it was written"
        except OSError as error:
            return f"{part / name} cannot be read: {error.strerror}"
    return None


def steps_of(folder: Path) -> list[Path]:
    """The folders of checkpoints, whole or not, the oldest first."""
    return sorted(path for path in folder.glob("step-*") if is_step(path) and not path.is_symlink())


def is_step(path: Path) -> bool:
    """Whether a path has the name of a checkpoint's folder."""
    return _STEP.fullmatch(path.name) is not None


def is_checkpoint(path: Path) -> bool:
    """Whether a path has the name of something in a folder of checkpoints."""
    return is_step(path) or path.name == "base"


def remove_checkpoints(folder: Path) -> None:
    """Remove all checkpoints that a run made, and their folder if nothing else is in it."""
    for path in filter(is_checkpoint, folder.glob("*")):
        remove(path)
    with suppress(OSError):
        folder.rmdir()


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def base_of(folder: Path, stage: int, name: str) -> Path:
    """The file for the rows of a store from checkpoints that were removed."""
    return folder / "base" / f"stage-{stage}" / f"{name}.slots"


def saved_rows(part: Path) -> Iterator[SavedRows]:
    """The rows in one stage's part. Of a part that is being deleted, half of a pair may be left: the base has its rows.

    Where the base has not, a row differs from its checksum.
    """
    from thinwire.compress.stores.saved import SavedRows

    for path in sorted(part.glob("*.rows")):
        if path.with_suffix(".slots").exists():
            with reading(part):
                yield SavedRows.open(path)


def keep_needed(
    folder: Path,
    stages: Sequence[int],
    retired: Sequence[Path],
    oldest: Path,
    claim: Callable[[Path], None],
) -> list[Path]:
    """The parts of some stages in retired checkpoints that stay. They lose all but their rows: weights take most room.

    AQ-SGD writes every row of its stores anew in each epoch. So a row mostly needs no copy: it stays where it is until
    later checkpoints have all rows of its part, and then the part goes. Only if there are many, the oldest go into the
    base.

    Args:
        retired: the folders of retired checkpoints of this cut, the oldest first.
        oldest: the folder of the oldest checkpoint that stays.
        claim: makes a folder of this run, or takes one that it made before.

    Raises:
        CheckpointError, StoreError: rows cannot be read, or not be written to the base.
    """
    from thinwire.compress.stores.saved import fold

    stay = []
    for stage in stages:
        name = f"stage-{stage}"
        needed = _needed([path / name for path in retired], oldest / name)
        surplus = max(0, len(needed) - MOST_RETIRED)
        if surplus:
            claim(folder / "base")
        for part in needed[:surplus]:
            for saved in saved_rows(part):
                fold(base_of(folder, stage, saved.path.stem), saved)
            shutil.rmtree(part, ignore_errors=True)  # before the next one is folded over it
        for part in needed[surplus:]:
            for unneeded in (TENSORS, VALUES):
                (part / unneeded).unlink(missing_ok=True)
        stay += needed[surplus:]
    return stay


def _needed(retired: Sequence[Path], oldest: Path) -> list[Path]:
    """The parts of a stage in retired checkpoints that have a row which no later part has, the oldest first.

    Args:
        retired: its parts, the oldest first.
        oldest: its part in the oldest checkpoint that stays. What is later does not count: that one must be restored.
    """
    later: dict[str, set[int]] = defaultdict(set)
    needed = []
    for part in (oldest, *reversed(retired)):
        rows = {saved.path.stem: set(saved.slots) for saved in saved_rows(part)}
        if any(slots - later[store] for store, slots in rows.items()):
            needed.append(part)
        for store, slots in rows.items():
            later[store] |= slots
    return [part for part in reversed(needed) if part != oldest]


def digest_of(path: Path) -> str:
    """The XXH3 of a file in hex, 128 bits; of a file of rows, the SHA-256 of their CRC-32.

    Raises OSError, or StoreError if a file of rows has not the size of its rows.
    """
    if path.suffix == ".rows":
        from thinwire.compress.stores.saved import SavedRows

        return SavedRows.open(path).digest()
    with opened(path) as file:
        return hashlib.file_digest(file, DIGEST).hexdigest()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Around code that reads a checkpoint, or takes its values apart: CheckpointError if a run does not write such.

    A file may be of another host or another release, and have the digest that its manifest names.
    """
    with as_written(path, CheckpointError):
        try:
            yield
        except (SafetensorError, RuntimeError) as error:  # RuntimeError: of torch, about tensors of another shape
            if isinstance(error, ThinwireError | RecursionError):
                raise
            raise ValueError(str(error)) from error


def _check_fields(manifest: Manifest) -> None:
    """Raise TypeError or ValueError if a field is of another kind: a manifest may come from another host."""
    if manifest.format != MANIFEST_FORMAT:
        raise ValueError(f"it must have format {MANIFEST_FORMAT}, got {manifest.format}")
    if type(manifest.step) is not int or manifest.step < 0 or not isinstance(manifest.header, dict):
        raise TypeError("its step or its header is of another kind")
    if sorted(map(int, manifest.files)) != list(range(len(manifest.files))):
        raise ValueError("its stages are not numbered from 0")
    if not all(isinstance(files, dict) for files in manifest.files.values()):
        raise TypeError("the files of a stage are no names with digests")
    for name in {name for files in manifest.files.values() for name in files}:
        if name != Path(name).name:
            raise ValueError(f"{name!r} is not the name of a file")


def _digest_of(values: Mapping[str, Any]) -> str:
    """The SHA-256 of JSON values, the same for every way to write them."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
