"""Folders for as long as a command runs, whose names say whose they are, so that those of killed ones can be removed.

A process is named by its pid and the time it started: one started later under the same pid is another.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
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


def folder() -> tempfile.TemporaryDirectory[str]:
    """A folder of this process, removed on leaving."""
    return tempfile.TemporaryDirectory(prefix=f"{PREFIX}-{owner()}-")


def remove_orphans() -> list[str]:
    """Remove the folders of processes that are gone; their paths."""
    found = [(path, _NAME.fullmatch(path.name)) for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}-*")]
    orphans = [path for path, named in found if named and not is_alive(named[1])]
    for path in orphans:
        shutil.rmtree(path, ignore_errors=True)  # another process may be removing it as well
    return [str(path) for path in orphans]


def _started(pid: int) -> str:
    """When a process started, in ticks since boot; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
