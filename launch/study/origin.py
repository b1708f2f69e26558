"""What a cell's numbers depend on: the fields of its recipe, and digests of its data, of files and of code.

A finished cell is not run again while its origin is the same.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.launch.run.fields import WITHOUT_EFFECT, is_among, values_of
from thinwire.launch.run.recipe import Recipe
from thinwire.launch.run.weights import with_run_weights

if TYPE_CHECKING:
    from thinwire.models.data.samples import Data
    from thinwire.models.options import ModelOptions

_CODE = ("thinwire.compress", "thinwire.models", "thinwire.pipeline", "thinwire.launch.run")
"""The packages whose code decides a cell's numbers."""

_OF_A_MODEL = ("config.json", "*.safetensors", "*.safetensors.index.json", "stage-*/*.safetensors")
"""The files of a model's folder that its numbers depend on."""

_OWN = re.compile(r"([A-Za-z_][\w.]*)[:.][A-Za-z_]\w*")
"""An object of your own, as a recipe names it: module:factory, or a codec module.Class(4)."""


def origin_of(wanted: Recipe, data: Data, digest: Callable[[Path], str]) -> dict[str, Any]:
    """The origin of a cell, as JSON values by dotted name.

    Args:
        wanted: its recipe; your own modules that it names are imported.
        data: its data.
        digest: gives the digest of a file.
    """
    kept = {name: value for name, value in values_of(asdict(wanted)).items() if not is_among(name, WITHOUT_EFFECT)}
    held_out = data.held_out.digest if data.held_out is not None else None
    origin = {**kept, "data": [data.training.digest, held_out], "code": code_digest()}
    # these two names are not there without such files: then a cell of an older version is still the same
    if found := _files_of(wanted.model):
        origin["model's files"] = [digest(path) for path in found]
    if found := _own_modules(kept):
        origin["own code"] = [digest(path) for path in found]
    values: dict[str, Any] = json.loads(json.dumps(origin))
    return values


@cache
def code_digest() -> str:
    """SHA-256 of the code that decides a cell's numbers, the first 12 characters."""
    hashed = hashlib.sha256()
    for package in _CODE:
        root = files(package)
        for path in sorted(root.rglob("*.py"), key=lambda path: str(path.relative_to(root))):  # type: ignore[attr-defined]
            hashed.update(f"{package}/{path.relative_to(root)}\n".encode() + path.read_bytes())
    return hashed.hexdigest()[:12]


def file_digest(path: Path) -> str:
    """SHA-256 of a file, the first 12 characters."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def _files_of(model: ModelOptions) -> list[Path]:
    """The files of this machine that a model is made from, and its first weights."""
    folders = [Path(place) for place in dict.fromkeys((model.name, with_run_weights(model).weights))]
    return [path for folder in folders for pattern in _OF_A_MODEL for path in sorted(folder.glob(pattern))]


def _own_modules(kept: Mapping[str, Any]) -> list[Path]:
    """The files of your own modules that the fields of a recipe name."""
    named: Iterable[str] = {name for value in kept.values() for name in _OWN.findall(str(value))}
    own = [getattr(sys.modules.get(name), "__file__", None) for name in sorted(named)]
    return [Path(file) for file in own if file is not None]
