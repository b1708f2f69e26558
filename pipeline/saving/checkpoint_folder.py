"""The folder of checkpoints: where files lie, the manifest, which checkpoints are whole, and one stage's part.

`checkpoint.py` says what the files are. Whether there are any is asked before a training is imported.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
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

MANIFEST = "manifest.json"
NEW = "new-"
"""How the name of a checkpoint of weights begins until it is whole."""
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

    Without `stores` their rows are not asked for.
    """
    found = (
        _changed(SavedStage(folder, manifest.step, stage).path, manifest.files.get(str(stage), {}), stores)
        for stage in stages
    )
    return next(filter(None, found), None)


def passed_over(troubles: Mapping[int, str]) -> list[str]:
    """A sentence for each checkpoint that cannot be taken, by its step: which, and why."""
    return [f"the checkpoint of step {step} is passed over: {said}" for step, said in sorted(troubles.items())]


def step_folder(folder: Path, step: int) -> Path:
    """The folder of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def _readable(path: Path) -> Manifest | None:
    try:
        manifest = Manifest.parse(read_text(path / MANIFEST), str(path / MANIFEST))
    except (OSError, ValueError, CheckpointError):
        return None
    return manifest if manifest.step == step_of(path) else None


def _changed(part: Path, files: Mapping[str, str], stores: bool) -> str | None:
    """What is wrong with the files of a part; None if they are as they were written."""
    if not files:
        return f"{part} is of a stage that its manifest does not name"
    if (said := stray(part)) is not None:
        return said
    for name, digest in files.items():
        if not stores and Path(name).suffix in (".rows", ".slots"):
            continue
        if Path(name).suffix == ".slots":
            return f"{part} is of an earlier release, which kept the rows of a checkpoint in several folders"
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


def remove_checkpoints(folder: Path) -> None:
    """Remove all checkpoints that a run made, and their folder if nothing else is in it."""
    for path in filter(is_step, folder.glob("*")):
        remove(path)
    with suppress(OSError):
        folder.rmdir()


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def digest_of(path: Path) -> str:
    """The XXH3 of a file in hex, 128 bits. Raises OSError."""
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
