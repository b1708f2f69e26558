"""Files that only grow. A full disk holds nothing up.

Entries that the disk has no room for stay in memory, in order, until it has. No file holds a part of an entry.
"""

from __future__ import annotations

import errno
import io
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from thinwire.compress.stores.durable import write_durably
from thinwire.errors import files

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}
"""Errors of a disk that is full, over its quota, or read-only."""


class LogFile:
    """A file that grows by whole entries, from its end if it is there."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, _opened(path)
        self._size = self._file.tell()
        self._torn = False
        self._waiting: deque[bytes] = deque()

    @property
    def waiting(self) -> int:
        """Bytes that the disk has had no room for so far."""
        return sum(map(len, self._waiting))

    def add(self, entry: bytes) -> None:
        """Add an entry; if the disk is full, the entry waits in memory."""
        self._waiting.append(entry)
        try:
            self.write()
        except OSError as error:
            if error.errno not in FULL:
                raise

    def written(self) -> Callable[[], None]:
        """Write what waits, and give a function that waits until the disk has it. Call it once, on any thread.

        Raises:
            OSError: there is no room.
        """
        self.write()
        return partial(_sync_and_close, os.dup(self._file.fileno()))

    def close(self) -> None:
        """Write what waits, and close the file. OSError if there is no room."""
        with self._file:
            self.written()()

    def write(self) -> None:
        """Write what waits. OSError if there is no room for it."""
        while self._waiting:
            self._append(self._waiting[0])
            self._waiting.popleft()

    def put_back(self) -> bool:
        """Write the file again if somebody moved or removed it; whether that was so.

        Raises:
            FileExistsError: another file is in its place.
            OSError: there is no room.
        """
        if self._path.exists():
            if not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                raise FileExistsError(self._path)
            return False
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file.seek(0)
        write_durably(self._path, self._file.readall())
        self._file.close()
        self._file = _opened(self._path)
        return True

    def _append(self, entry: bytes) -> None:
        self._mend()
        left = memoryview(entry)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._torn = True
            self._mend()
            raise
        self._size += len(entry)

    def _mend(self) -> None:
        """Cut off the part of an entry."""
        if self._torn:
            self._file.truncate(self._size)
            self._torn = False


def _opened(path: Path) -> io.FileIO:
    """The file, which grows at its end, and can be read even after somebody has removed it."""
    return io.FileIO(files.open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+b")


def _sync_and_close(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
