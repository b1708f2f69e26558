"""Files that only grow. Where a disk filled up, or a process was killed, the last entry may be a part of one."""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from thinwire.compress.stores.durable import write_durably
from thinwire.errors import files

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}
"""Errors of a disk that is full, over its quota, or read-only."""


class LogFile:
    """A file that grows by whole entries, from its end if it is there."""

    def __init__(self, path: Path) -> None:
        self._file = io.FileIO(files.open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+b")

    def add(self, entry: bytes) -> None:
        """Add an entry. OSError if there is no room."""
        left = memoryview(entry)
        while left:
            left = left[self._file.write(left) :]

    def sync(self) -> None:
        """Wait until the disk has all entries, on any thread. OSError if it has no room."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Wait until the disk has all entries, and close the file. OSError if it has no room."""
        with self._file:
            self.sync()


def is_empty(path: Path) -> bool:
    """Whether a log has no lines."""
    return not (path.is_file() and path.stat().st_size)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The values of all whole lines of a log of JSON; none if there is no log."""
    return [values for _, values in _parsed(path)] if path.exists() else []


def keep_lines(path: Path, stays: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Remove the last lines of a log of JSON; the values of the lines that stay.

    The file is written again, even where all its lines stay: the end of a line may be missing.
    """
    lines = list(_parsed(path)) if path.exists() else []
    staying = [(line, values) for line, values in lines if stays(values)]
    # a kill from here on loses no line
    write_durably(path, "".join(f"{line}\n" for line, _ in staying).encode())
    return [values for _, values in staying]


def _parsed(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The whole lines of a log, and their values. Those that no run wrote are left out."""
    for line in files.read_lines(path):
        with suppress(ValueError, TypeError, RecursionError):  # only a part of the last line was written
            yield line, dict(json.loads(line))
