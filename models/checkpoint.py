"""Pretrained weights in safetensors files. A stage reads only its own tensors.

A file that is read through a memory map counts as memory of the process while it is mapped. So a tensor is copied in
parts, and the file is closed after each part: the process never holds more than its stage and one part.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.errors.calls import first_line
from thinwire.errors.files import read_object
from thinwire.errors.names import first_of
from thinwire.models import hub
from thinwire.models.digest import tensor_lines
from thinwire.models.errors import ModelError, require
from thinwire.models.first_bytes import told_by

_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OF_STAGES = "stage-*/*.safetensors"
WEIGHTS = "weights/"
"""What the names of weights begin with in a checkpoint of a run, beside what else it has."""
_OTHERS = (
    ("adapter_config.json", "an adapter: merge it into its base model, by merge_and_unload() of peft"),
    ("*.gguf", "a GGUF file: take the model as safetensors"),
    ("pytorch_model.bin*", "pytorch_model.bin: convert it with from_pretrained(...).save_pretrained(...)"),
    ("*.safetensors", f"safetensors of another name: rename the file to {_FILE}"),
)
"""What a folder may hold in place of weights, and what to do with it."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_NARROW = {"bfloat16": "BF16", "float16": "F16"}
_QUANTIZED = re.compile(r"(scales?(_inv)?|qweight|qzeros|g_idx|absmax|quant_map|quant_state\..*|SCB)$")
"""The ends of the names of tensors without which quantized weights mean nothing."""
_PART_BYTES = 8 * 2**20
_OF_THE_FILE = ("transformers_version", "_name_or_path")
"""The fields of a configuration that say where it comes from."""
_SAMPLES = 64
"""The tensors of which a digest has a row."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a model in its files."""

    parts: tuple[tuple[str, str], ...]
    """The file of each tensor that it is made of, and the name there."""
    make: Callable[[Sequence[Tensor]], Tensor] | None = None
    """Makes it of them; None if it is there as it is."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The values of a pretrained model, by the full names of the model that takes them."""

    source: str
    """The folder, or the name on the hub."""
    stored: Mapping[str, Stored]
    """Where each tensor is, by its name in the model; by its name in the files if the model has no such tensor."""
    tied: Mapping[str, str]
    """Tensors that take the values of another tensor if the files lack them:
    {"lm_head.weight": "transformer.wte.weight"}."""
    fresh: tuple[str, ...] = ()
    """Prefixes of full names. The seed may give these tensors if the files lack them: a new classifier."""
    ignored: tuple[str, ...] = ()
    """Patterns of stored names that nobody misses: buffers that older releases stored."""

    def lacking(self, names: Sequence[str]) -> list[str]:
        """The tensors among these that the files lack and the seed may give.

        Raises:
            ModelError: the files lack other tensors; the message names the first few.
        """
        missing = [name for name in names if self._find(name) is None]
        lost = [name for name in missing if not name.startswith(self.fresh)]
        require((not lost, f"{self.source} must hold every weight of the model, and lacks {first_of(lost)}"))
        return missing

    def unread(self, names: Sequence[str]) -> list[str]:
        """The names in the files that a model of these names does not read, but for those that nobody misses.

        Raises:
            ModelError: among them are the scales of quantized weights.
        """
        read = {part for name in names if (place := self._find(name)) for part in place.parts}
        beside = [name for name, place in self.stored.items() if not read.issuperset(place.parts)]
        left = [name for name in beside if not any(re.search(pattern, name) for pattern in self.ignored)]
        scales = [name for name in left if _QUANTIZED.search(name)]
        if scales:
            raise ModelError(
                f"{self.source} must hold weights that are not quantized, got {first_of(scales)}; take the model that "
                "was quantized"
            )
        return left

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Compare shapes with those in the files of a folder. This downloads nothing.

        Raises:
            ModelError: a tensor has another shape in the files; the message names all such tensors.
        """
        if Path(self.source).is_dir():
            self._fitting(tensors)

    def digest(self) -> str:
        """A hash of the configuration in the folder, of all names, shapes and types, and of a row of some tensors."""
        if not Path(self.source).is_dir():
            return ""
        files = sorted({file for place in self.stored.values() for file, _ in place.parts})
        paths = [locate(self.source, file) for file in files]
        known = sorted((name, *about, path) for path in paths for name, about in read_headers(path).items())
        hashed = hashlib.sha256(_configuration(Path(self.source)).encode())
        hashed.update(repr([about for *about, _ in known]).encode())
        for name, *_, path in known[:: max(1, len(known) // _SAMPLES)]:
            with _opened(path) as file:
                part = file.get_slice(name)
                row = part[:1] if part.get_shape() else file.get_tensor(name)
            hashed.update(tensor_lines({name: row})[0].encode())
        return hashed.hexdigest()

    def wide(self, dtype: str) -> list[str]:
        """As that of `Weights`."""
        if dtype not in _NARROW or not Path(self.source).is_dir():
            return []
        files = {file for place in self.stored.values() for file, _ in place.parts}
        headers = {file: read_headers(locate(self.source, file)) for file in files}
        found = {name: {headers[file][key][1] for file, key in place.parts} for name, place in self.stored.items()}
        mixed = {_NARROW[dtype]} in found.values()
        return sorted(name for name, kinds in found.items() if mixed and kinds == {"F32"})

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the stored values into tensors on the CPU, in the tensors' own dtype.

        Raises:
            ModelError: a tensor has another shape in the files. The message names all such tensors; nothing is copied.
        """
        for name, place in self._fitting(tensors).items():
            parts = [(locate(self.source, file), key) for file, key in place.parts]
            if place.make is None:
                [(path, key)] = parts
                _copy(path, key, tensors[name])
            else:
                tensors[name].copy_(place.make([_read(path, key) for path, key in parts]))

    def _fitting(self, tensors: Mapping[str, Tensor]) -> dict[str, Stored]:
        """Where each tensor is. ModelError names every tensor of another shape."""
        places = {name: place for name in tensors if (place := self._find(name)) is not None}
        files = sorted({file for place in places.values() for file, _ in place.parts})
        paths = {file: locate(self.source, file) for file in files}
        headers = {file: read_headers(path) for file, path in paths.items()}
        misfits, quantized = [], []
        for name, place in places.items():
            for file, key in place.parts:
                if key not in headers[file]:
                    raise ModelError(f"{paths[file]} must hold {key}, because the index says so, and does not")
            found = [headers[file][key] for file, key in place.parts]
            shape = _shape(place, [shape for shape, _ in found])
            if shape != list(tensors[name].shape):
                misfits.append(f"{name} must be of shape {list(tensors[name].shape)}, got {shape}")
            if other := [dtype for _, dtype in found if tensors[name].is_floating_point() and dtype not in _FLOATS]:
                quantized.append(f"{name} ({other[0]})")
        require(
            (not misfits, f"the weights of {self.source} do not fit the model: {'; '.join(misfits)}"),
            (
                not quantized,
                f"{self.source} must hold weights of {', '.join(_FLOATS)}, got {first_of(quantized)}; take the model "
                "that was quantized",
            ),
        )
        return places

    def without(self, prefixes: Sequence[str]) -> "Checkpoint":
        """The same checkpoint without the tensors of these prefixes; the seed gives them: a head for other classes."""
        kept = {name: place for name, place in self.stored.items() if not name.startswith(tuple(prefixes))}
        return replace(self, stored=kept, fresh=tuple(prefixes))

    def _find(self, name: str) -> Stored | None:
        return self.stored.get(name) or self.stored.get(self.tied.get(name, name))


def open_checkpoint(
    source: str,
    *,
    named: Callable[[Mapping[str, str]], Mapping[str, Stored]] | None = None,
    tied: Mapping[str, str] | None = None,
) -> Checkpoint:
    """Find the safetensors files of a folder or of a name on the hub. Only names are read, no values.

    `named` gives the tensors of the model for names in the files: name -> file; None if the names are the same, as in a
    checkpoint of a run. Of two tensors that are `tied`, one that the files lack takes the other's values. If they hold
    both, each has its own.

    Raises:
        ModelError: there are no safetensors files.
    """
    pairs, files = dict(tied or {}), _weight_map(source)
    of_run = any(name.startswith(WEIGHTS) for name in files)
    return Checkpoint(
        source=source,
        stored={name.removeprefix(WEIGHTS): Stored(((file, name),)) for name, file in files.items()}
        if named is None or of_run
        else named(files),
        tied={other: name for name, other in pairs.items()} | pairs,
    )


def in_place_of_weights(source: str) -> str | None:
    """What a folder holds in place of a model's weights, and what to do with it, in words; None if nothing is known."""
    return next((said for name, said in _OTHERS if any(Path(source).glob(name))), None)


def locate(source: str, file: str) -> Path:
    """The path of one file of a model. The file is downloaded if the source is a name on the hub.

    Raises:
        ModelError: there is no such file.
    """
    path = find(source, file)
    if path is None:
        raise ModelError(f"{source} must hold {file}, because its index names this file; it is missing")
    return path


def find(source: str, file: str) -> Path | None:
    """The path of one file of a model, as `locate` does, or None if there is no such file."""
    if Path(source).is_dir():
        path = Path(source) / file
        return path if path.is_file() else None
    try:
        return hub.file_of(source, file)
    except OSError as error:
        rule = "a model must be a folder or a name on the hub"
        raise ModelError(f"{rule}, got {source!r}: {hub.reason(source, error)}") from error


def is_of_run(source: str) -> bool:
    """Whether the weights are a checkpoint of a run, in parts of stages: RUN/weights/step-N."""
    return any(Path(source).glob(_OF_STAGES))


def _configuration(folder: Path) -> str:
    """What config.json says of the model; empty where there is none."""
    try:
        found = read_object((folder / "config.json").resolve())  # a link in the hub's cache
    except (OSError, ValueError):  # a run's checkpoint has none; what cannot be read is told elsewhere
        return ""
    return json.dumps({name: found[name] for name in found if name not in _OF_THE_FILE}, sort_keys=True)


def _weight_map(source: str) -> dict[str, str]:
    """The file of each tensor, for a saved model or for a checkpoint of a run."""
    # as in transformers, the whole file counts where both are: an index may be left from before
    single = find(source, _FILE)
    if single is not None:
        return dict.fromkeys(read_headers(single), _FILE)
    index = find(source, _INDEX)
    if index is not None:
        return _read_index(index)
    if stages := sorted(path for path in Path(source).glob(_OF_STAGES) if path.is_file()):
        files = {name: str(path.relative_to(source)) for path in stages for name in read_headers(path)}
        return {name: file for name, file in files.items() if name.startswith(WEIGHTS)}
    instead = in_place_of_weights(source) if Path(source).is_dir() else None
    way_out = f"it holds {instead}" if instead else "to draw the weights from the seed, set weights: fresh"
    raise ModelError(f"{source} must hold {_FILE} or {_INDEX}; both are missing; {way_out}")


def _read_index(path: Path) -> dict[str, str]:
    """The file of each tensor, read from an index. ModelError if the index is not such a table."""
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in weight_map.values()
        ):
            raise TypeError("it does not map names to files of this folder")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ModelError(f"weight_map in {path} must name the file of each tensor: {error}") from error
    return weight_map


def _shape(place: Stored, shapes: Sequence[tuple[int, ...]]) -> list[int] | str:
    """The shape of what is made of tensors of these shapes, or why nothing is."""
    if place.make is None:
        return list(shapes[0])
    try:
        return list(place.make([torch.empty(shape, device="meta") for shape in shapes]).shape)
    except Exception as error:  # of the library, for tensors that do not fit each other
        return f"{len(shapes)} tensors that do not make one: {first_line(error)}"


def read_headers(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """The shape and the type of each tensor of a file, by its name: ((2, 3), "F32").

    ModelError if it is not a whole safetensors file.
    """
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}


def _copy(path: Path, name: str, out: Tensor) -> None:
    """Copy one tensor to `out` and to the dtype of `out`, one part of rows at a time."""
    if out.ndim == 0:
        out.copy_(_read(path, name))
        return
    row_bytes = max(1, out.nbytes // max(1, len(out)))
    rows = max(1, _PART_BYTES // row_bytes)
    for start in range(0, len(out), rows):
        # open the file again for each part: closing it frees the pages that were read
        with _opened(path) as file:
            out[start : start + rows] = file.get_slice(name)[start : start + rows]


def _read(path: Path, name: str) -> Tensor:
    with _opened(path) as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        opened: Any = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} must be a whole safetensors file, got {told_by(path) or error}") from error
    return opened
