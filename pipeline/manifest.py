"""The manifest of a checkpoint: the digests of its files, and the settings of its run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.pipeline.errors import CheckpointError

MANIFEST_FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """The manifest of a complete checkpoint."""

    step: int
    """Optimizer steps that were done."""
    header: Mapping[str, Any]
    """The settings that made it, as JSON values."""
    files: Mapping[str, Mapping[str, str]]
    """For each stage, "0" the first, the SHA-256 of its files by name."""
    format: int = MANIFEST_FORMAT

    @property
    def cut(self) -> object:
        """The layers of each stage, as a JSON value; None if the header does not say."""
        return self.header.get("cuts")

    @classmethod
    def parse(cls, text: str, where: str) -> Manifest:
        """The manifest in a text from `where`. CheckpointError if it is not a manifest, or is damaged."""
        try:
            values = json.loads(text)
            digest = values.pop("digest")
            manifest = cls(**values)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{where} is not the manifest of a checkpoint: {error!r}") from error
        if digest != _digest_of(values):
            raise CheckpointError(f"{where} is damaged: it has not the digest that it names")
        if manifest.format != MANIFEST_FORMAT:
            raise CheckpointError(
                f"{where} must have format {MANIFEST_FORMAT}, got {manifest.format}: use the same release"
            )
        return manifest

    def text(self) -> str:
        """The manifest as JSON, with its own digest."""
        values = asdict(self)
        return json.dumps({**values, "digest": _digest_of(values)}, indent=1)


def _digest_of(values: Mapping[str, Any]) -> str:
    """The SHA-256 of JSON values, the same for every way to write them."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
