"""Folders for as long as a command runs, whose names say whose they are, so that those of killed ones can be removed.

A process is named by its pid and the time it started: one started later under the same pid is another.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "thinwire"
_NAME = re.compile(rf"{PREFIX}-(\d+-\d+)-\w+")


def owner() -> str:
    """This process, as part of a name."""
    return f"{os.getpid()}-{_started(os.getpid())}"


def is_alive(owner: str) -> bool:
    """Whether the process that called itself `owner` still runs."""
    pid, _, started = owner.partition("-")
    return _started(int(pid)) == started


@contextmanager
def folder() -> Iterator[Path]:
    """A folder of this process, which no other user can read, removed on leaving."""
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}-{owner()}-", ignore_cleanup_errors=True) as made:
        held = lock(Path(made))
        try:
            yield Path(made)
        finally:
            os.close(held)


def remove_orphans() -> list[str]:
    """Remove the folders of processes that are gone; their paths."""
    found = [(path, _NAME.fullmatch(path.name)) for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}-*")]
    orphans = [path for path, named in found if named and not is_alive(named[1]) and not _in_use(path)]
    for path in orphans:
        shutil.rmtree(path, ignore_errors=True)  # another process may be removing it as well
    return [str(path) for path in orphans]


def _in_use(path: Path) -> bool:
    """Whether a process that this one cannot see, such as one of another container, holds the folder."""
    try:
        os.close(lock(path))
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def lock(path: Path) -> int:
    """Hold a folder until the descriptor returned is closed, which its process's death does, however it comes.

    Raises BlockingIOError where another process holds it. File systems that lock nothing let everyone have it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        pass
    return descriptor


def _started(pid: int) -> str:
    """When a process started, in ticks since boot; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
