"""Entry points of installed packages, found without `importlib.metadata` where no package has one.

The import of `importlib.metadata` and its search take longer than the rest of `thinwire --help`. So this file first
looks for the name of the group in the files that hold entry points.
"""

# the import of pathlib would take longer than this search
# ruff: noqa: PTH113, PTH118, PTH123

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_METADATA = (".dist-info", ".egg-info")
"""Ends of the names of folders with the facts about a package."""


def entry_points(group: str) -> Sequence[EntryPoint]:
    """The entry points of a group, of all installed packages."""
    if not _may_exist(group):
        return ()
    from importlib import metadata

    return tuple(metadata.entry_points(group=group))


def _may_exist(group: str) -> bool:
    """Whether a package may have an entry point of the group. True if only `importlib.metadata` knows."""
    if any(hasattr(finder, "find_distributions") for finder in sys.meta_path if finder is not PathFinder):
        return True
    places = [place or os.curdir for place in sys.path]
    if any(os.path.isfile(place) or place.endswith(".egg") for place in places):  # packages in archives
        return True
    return any(group.encode() in text for place in places for text in _texts(place))


def _texts(place: str) -> Iterator[bytes]:
    """The files with entry points of all packages in a folder of `sys.path`."""
    try:
        folders = [entry.path for entry in os.scandir(place) if entry.name.lower().endswith(_METADATA)]
    except OSError:  # such as a folder that does not exist
        return
    for folder in folders:
        try:
            with open(os.path.join(folder, "entry_points.txt"), "rb") as file:
                yield file.read()
        except OSError:  # a package without entry points
            continue
