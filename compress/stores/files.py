"""The stores of one process's feedback, and the files of those on disk: named, made, and deleted at the end.

A file belongs to the store that has it open. A file left by an earlier run is replaced, if the folder has the mark of a
run. A file of another live store is never replaced: the second user of a folder gets an error, and nothing is lost.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

from thinwire.compress.feedback import Method
from thinwire.compress.stores.disk import DiskStore
from thinwire.compress.stores.marks import claim, release
from thinwire.compress.stores.memory import MemoryStore
from thinwire.compress.stores.slot_file import remove_unused
from thinwire.compress.stores.store import CPU, Store, StoreError, StoreLayout

_RUN = ""
"""The id in the mark of a folder for stores: whatever run comes next may take it."""


class StoreFiles:
    """Makes stores, in memory or in files below one folder.

    Args:
        folder: where stores on disk keep their files; None if no method has stores on disk.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._made: list[tuple[Path, DiskStore]] = []
        self._missing = [] if folder is None else _missing(folder)

    def path(self, method: Method, name: str) -> Path | None:
        """The file of a store of this method and name; None if it is in memory."""
        if not is_on_disk(method):
            return None
        assert self._folder is not None, "a wire with stores on disk has a folder for them"
        return self._folder / f"{name}.slots"

    def make(self, method: Method, name: str, layout: StoreLayout, device: torch.device = CPU) -> Store:
        """A new, empty store of a stage on `device`.

        Raises StoreError if its file cannot be made, or another live store holds it.
        """
        path = self.path(method, name)
        if path is None:
            on_device = method.feedback is not None and method.feedback.store == "device"
            return MemoryStore(layout, device if on_device else CPU)
        try:
            claim(path.parent, _RUN, ("*.slots",))
            remove_unused(path)  # of an earlier run of the same name
        except OSError as error:
            raise StoreError(
                f"cannot make stores in {path.parent}: {error.strerror}; name another folder as "
                f"compression.store_folder"
            ) from error
        store = DiskStore(layout, path)
        self._made.append((path, store))
        return store

    def discard(self) -> None:
        """Delete the files made here, once; then their folder's mark, and the folders that were missing, if empty.

        The file of an open store is ours: no other store can open it. The file of a closed one may belong to another
        store by now.
        """
        if not self._made:
            return
        while self._made:
            path, store = self._made.pop()
            if not store.closed:
                path.unlink(missing_ok=True)
                continue
            with suppress(StoreError):
                remove_unused(path)
        assert self._folder is not None, "files were made in it"
        release(self._folder, _RUN)
        for place in self._missing:
            with suppress(OSError):
                place.rmdir()


def _missing(folder: Path) -> list[Path]:
    """A folder and those above it, as far as they are not there."""
    with suppress(OSError):  # it may not be looked at; to make it will say so
        return [place for place in (folder, *folder.parents) if not place.exists()]
    return []


def is_on_disk(method: Method) -> bool:
    """Whether a method keeps its buffers on disk."""
    return method.feedback is not None and method.feedback.store == "disk"
