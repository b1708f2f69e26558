"""Temporary folders of a command. Their names hold the process, so that folders of killed processes can be removed.

The name of a process is its pid and its start time, because a later process may get the same pid.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from thinwire.launch.shared.exit_codes import FailedError

PREFIX = "thinwire"
_ROOM = 1 << 20
_NAME = re.compile(rf"{PREFIX}-(\d+-\d+)-\w+")


def owner() -> str:
    """The name of this process, for names of folders and namespaces."""
    return f"{os.getpid()}-{_started(os.getpid())}"


def is_alive(owner: str) -> bool:
    """Whether the process with this name still runs."""
    pid, _, started = owner.partition("-")
    return _started(int(pid)) == started


@contextmanager
def folder() -> Iterator[Path]:
    """A private folder of this process; it is removed at the end.

    TMPDIR may have filled up or gone since the folder before, so another place is chosen if it cannot be written now.

    Raises:
        FailedError: there is none.
    """
    tempfile.tempdir = None
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise FailedError(f"TMPDIR must name a folder that can be written: {error.strerror or error}") from error
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}-{owner()}-", ignore_cleanup_errors=True) as made:
        if found := no_room(Path(made), _ROOM):
            raise FailedError(
                f"TMPDIR must have room for {_ROOM >> 20} MiB, for the rendezvous of a run, but {Path(made).parent} "
                f"has not: {found.strerror}; name another folder, and see ulimit -f"
            ) from found
        held = lock(Path(made))
        try:
            yield Path(made)
        finally:
            os.close(held)


def no_room(place: Path, nbytes: int) -> OSError | None:
    """Why a folder has no room for so many bytes; None if it has."""
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(nbytes))
            file.flush()
    except OSError as error:
        return error
    return None


def of_parent() -> Path:
    """A private folder that all processes with our parent share; `remove_orphans` removes it once the parent has ended.

    Raises OSError if there is none, or if it is not ours alone.
    """
    parent = os.getppid()
    if not (started := _started(parent)):
        raise OSError("the parent has no start time, which distinguishes it from a later process with its number")
    path = Path(tempfile.gettempdir(), f"{PREFIX}-{parent}-{started}-shared")
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path} is open to others")
    return path


def remove_orphans() -> list[str]:
    """Remove this user's folders of processes that have ended; their paths. Anybody may write beside them."""
    found = [(path, _NAME.fullmatch(path.name)) for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}-*")]
    ended = [path for path, named in found if named and not is_alive(named[1])]
    orphans = [path for path in ended if _is_ours(path) and not _in_use(path)]
    for path in orphans:
        shutil.rmtree(path, ignore_errors=True)  # another process may be removing it as well
    return [str(path) for path in orphans]


def _is_ours(path: Path) -> bool:
    """Whether it is a folder of this user. To open a pipe would wait for ever, and the folder of another is closed."""
    with suppress(FileNotFoundError):
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False


def _in_use(path: Path) -> bool:
    """Whether a process holds the folder, even one in another container that this process cannot see."""
    try:
        os.close(lock(path))
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def lock(path: Path, *, alone: bool = True) -> int:
    """Lock a folder until the returned descriptor is closed, or the process has ended; with others if not `alone`.

    Raises BlockingIOError if another process holds the folder. On a file system without locks, every process gets it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        pass
    return descriptor


def _started(pid: int) -> str:
    """The start time of a process, in ticks since boot; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
