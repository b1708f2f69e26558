"""Where the processes of a run post what they have written for a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from thinwire.launch.shared import variables
from thinwire.pipeline.errors import CheckpointError


def words_of_run() -> dist.Store:
    """Where the processes of a run post what they have written for a checkpoint."""
    rendezvous = os.environ.get(variables.RENDEZVOUS)
    if rendezvous is not None:
        return FileWords(Path(rendezvous).parent)
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


class FileWords(dist.Store):
    """What stage processes post for each other while they train: a file for each word, in the folder of their run.

    A file store of torch only grows, and opening one holds the GIL for minutes if its folder is gone. The launcher
    removes the folder when the run has ended.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def set(self, key: str, value: str) -> None:
        """Post a word. CheckpointError if the folder is gone."""
        path = self._path(key)
        fresh = path.with_suffix(".new")
        try:
            fresh.write_text(value)
            fresh.replace(path)  # whoever finds it finds all of it
        except FileNotFoundError:
            raise self._gone() from None
        except OSError as error:
            raise CheckpointError(
                f"{self._folder} must have room for some words of this run: {error.strerror}"
            ) from None

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these words are posted. CheckpointError if the folder is gone."""
        if all(self._path(key).exists() for key in keys):
            return True
        if not self._folder.is_dir():
            raise self._gone()
        return False

    def get(self, key: str) -> bytes:
        """A word that is posted. CheckpointError if it is gone, and its folder with it."""
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            raise self._gone() from None

    def delete_key(self, key: str) -> bool:
        """Take a word back."""
        self._path(key).unlink(missing_ok=True)
        return True

    def _gone(self) -> CheckpointError:
        return CheckpointError(
            f"{self._folder}, where the stages of this run report what they have written, must stay while the "
            f"run goes on, and is gone; set TMPDIR to a folder that nothing cleans up"
        )

    def _path(self, key: str) -> Path:
        return self._folder / f"{key.replace('/', '-')}.word"  # beside the reports of failures, which are *.json
