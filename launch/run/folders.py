"""The output folder of a run: created, checked, and locked against other runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thinwire.launch.run.recipe import Recipe
from thinwire.launch.run.weights import remove_leftovers
from thinwire.launch.shared import scratch
from thinwire.pipeline.errors import OptionsError


def check_folders(recipe: Recipe) -> None:
    """Raise OptionsError if the run cannot write to its folders."""
    folders = {"output": recipe.folder}
    if recipe.compression.store_folder:
        folders["compression.store_folder"] = Path(recipe.compression.store_folder)
    OptionsError.require(
        *(
            (reason is None, f"{field} must name a folder that can be written, got {folder}: {reason}")
            for field, folder in folders.items()
            for reason in [_refusal(folder)]
        )
    )


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """Lock the output folder of a run, and remove files that killed runs left half written.

    The descriptor holds the lock until this process and all that inherit it have ended. OptionsError if another run
    holds it.
    """
    try:
        descriptor = scratch.lock(folder)
    except BlockingIOError as error:
        raise OptionsError(
            f"output must name a folder that no other run writes to, and one writes to {folder} now; wait until it "
            f"has ended, or name another --output"
        ) from error
    try:
        remove_leftovers(folder)
        yield descriptor
    finally:
        os.close(descriptor)


def _refusal(folder: Path) -> str | None:
    """Why the folder cannot be written; None if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)
