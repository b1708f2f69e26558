"""The file of a disk store: of a fixed size, sparse, and checked at every access.

An open file can be deleted or cut short, and its owner gets no error: writes are lost, missing rows read as zeros, and
the run goes on with wrong rows. So every access asks the file system first, which takes less than a microsecond.
"""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from thinwire.compress.stores.store import StoreError
from thinwire.errors.files import opened


class SlotFile:
    """A file of `nbytes`, read and written at offsets, by any thread.

    It is created if needed, and takes room on the disk only as it is written. A file with content is refused. Nothing
    is deleted. While it is open, no other process can open it. Every method may raise StoreError, which names the file
    and says what to do.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes
        with self._explained("open"):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            self._claim()
        except BaseException:
            self.close()
            raise

    def read(self, offset: int, into: Tensor) -> None:
        """Fill `into`, contiguous uint8, with the bytes at `offset`."""
        with self._explained("read"):
            self._move(self.pread, offset, into)

    def write(self, offset: int, row: Tensor) -> None:
        """Put `row`, contiguous uint8, at `offset`."""
        with self._explained("write"):
            self._move(self.pwrite, offset, row)

    def sync(self) -> None:
        """Wait until everything written so far is on the disk."""
        with self._explained("write"):
            os.fsync(self._fd)
            self._check()

    def close(self) -> None:
        """Close the file, without deleting it."""
        os.close(self._fd)

    def pread(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset`, and return how many bytes came; tests replace it."""
        return os.preadv(self._fd, [buffer], offset)

    def pwrite(self, buffer: memoryview, offset: int) -> int:
        """Write `buffer` at `offset`, and return how many bytes were written; tests replace it."""
        return os.pwrite(self._fd, buffer, offset)

    def _move(self, transfer: Callable[[memoryview, int], int], offset: int, row: Tensor) -> None:
        self._check()
        buffer, done = row.numpy().data, 0
        while done < len(buffer):
            moved = transfer(buffer[done:], offset + done)
            if not moved:
                self._check()
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            done += moved

    def _claim(self) -> None:
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise StoreError(f"{self.path} is not a regular file; name a regular or a new file for the store")
        with self._explained("lock"):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StoreError(f"{self.path} is in use by another store; give each store its own file") from error
        if status.st_size:
            raise StoreError(
                f"{self.path} exists and holds {status.st_size} bytes, which a new store will not overwrite; "
                f"move it away, or name another file"
            )
        with self._explained(f"reserve {self.nbytes} bytes for"):
            os.ftruncate(self._fd, self.nbytes)

    def _check(self) -> None:
        status = os.fstat(self._fd)
        if status.st_nlink == 0:
            raise StoreError(
                f"{self.path} was deleted while the store was using it, and its rows are lost; keep other programs "
                f"away from it and start the run again"
            )
        if status.st_size < self.nbytes:
            raise StoreError(
                f"{self.path} was cut from {self.nbytes} to {status.st_size} bytes while the store was using it; keep "
                f"other programs away from it and start the run again"
            )

    @contextlib.contextmanager
    def _explained(self, verb: str) -> Iterator[None]:
        """Turn the system's errors into a sentence that names the file and says what to do."""
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "free some space there or name a file on a larger disk" if full else "check the path and the disk"
            raise StoreError(
                f"cannot {verb} {self.path}: {error.strerror}; {remedy}, then start the run again"
            ) from error


def remove_unused(path: Path) -> None:
    """Delete a file that an earlier store left, if there is one; StoreError if a live store has it open.

    Raises OSError if the file system refuses.
    """
    try:
        file = opened(path)
    except FileNotFoundError:
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(
                f"{path} is in use by another store; give each run its own folder as compression.store_folder"
            ) from error
        path.unlink()
