"""The mark of a folder that a run made: a file that says so. Without it, a run replaces and removes nothing there.

Names prove nothing: a folder that a user names may hold somebody's `base/` or `weights/`. The mark names a run by an
id, which a run's folder keeps, wherever it is moved. All folders that the run makes have the same.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from thinwire.compress.stores.durable import make_folder, write_durably
from thinwire.errors.files import MARK, read_text

ALL = ("*",)
_TEXT = (
    "A run of Thinwire writes here. It may replace or remove what it wrote: keep files of your own elsewhere.\nrun {}\n"
)
_PARSED = re.compile(re.escape(_TEXT).replace(re.escape("{}"), r"(\w*)"))


def run_of(folder: Path) -> str | None:
    """The id of the run that made a folder; None if no run did."""
    with suppress(OSError, ValueError):
        found = _PARSED.fullmatch(read_text(folder / MARK, most=1000))
        return found[1] if found else None
    return None


def stray(folder: Path) -> str | None:
    """A sentence about a link, pipe or device at or in a place within the folder of a run; None without one."""
    inside = (Path(place, name) for place, *names in os.walk(folder) for name in chain(*names))
    for path in chain([folder], inside):
        with suppress(FileNotFoundError, NotADirectoryError):  # another process removes it
            mode = os.lstat(path).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                return f"{path} is a link, a pipe or a device, and no run makes one"
    return None


def obstacle(folder: Path, names: Sequence[str] = ALL) -> str | None:
    """A sentence that says why a run must not write to a folder, which may be missing; None if it may.

    `names` are patterns of what the run writes there; with the usual, the whole folder is the run's.
    """
    if names == ALL and (said := stray(folder)) is not None:
        return said
    if not folder.exists():
        return None
    if not folder.is_dir():
        return f"{folder} is no folder"
    # in this order: another process of the run may be making the folder
    taken = sorted(path for name in names for path in folder.glob(name) if not path.name.startswith(MARK))
    return f"no run made {taken[0]}" if taken and run_of(folder) is None else None


def claim(folder: Path, run: str, names: Sequence[str] = ALL) -> None:
    """Make a folder of a run, durable on return, or take one that a run made before. OSError if `obstacle` has one."""
    if (said := obstacle(folder, names)) is not None:
        raise OSError(errno.EEXIST, said, str(folder))
    make_folder(folder)
    if run_of(folder) is None:
        write_durably(folder / MARK, _TEXT.format(run).encode())


def release(folder: Path, run: str) -> None:
    """Remove the mark of this run from a folder in which nothing else is left."""
    with suppress(OSError):
        if run_of(folder) == run and [path.name for path in folder.iterdir()] == [MARK]:
            (folder / MARK).unlink()


def remove(folder: Path, runs: Iterable[str] | None = None) -> None:
    """Remove a folder with all that is in it, if a run made it (one of these runs); else, or on a link, do nothing.

    The mark goes last: who is stopped in between finds it again. Other processes may remove the folder as well.
    """
    found = None if folder.is_symlink() else run_of(folder)
    if found is None or (runs is not None and found not in runs):
        return
    with suppress(OSError):
        for path in [path for path in folder.iterdir() if path.name != MARK]:
            erase(path)
        (folder / MARK).unlink(missing_ok=True)
        folder.rmdir()


def erase(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it. Other processes may remove it as well."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
