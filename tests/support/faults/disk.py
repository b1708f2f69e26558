"""A disk that may be full, and that may lose what nobody waited for when the power goes.

What is durable is what POSIX promises: the content of a file once it was synced, and the names in a folder once the
folder was. After a power cut a file that was changed since holds what it held, or what was written, or a part of it;
and of the changes to the names in a folder only the first ones are left. A killed process loses nothing of this.
"""

import errno
import itertools
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

OPERATIONS = ("fsync", "replace", "rename", "link", "mkdir", "unlink", "rmdir")
"""The functions of `os` that checkpoints and sets of weights are made with."""
_NEED_ROOM = ("fsync", "replace", "link", "mkdir")


@dataclass(frozen=True)
class Full:
    """The disk is full for some operations that need room, counted from 1."""

    first: int
    count: int
    number: int = errno.ENOSPC


class Disk:
    """One folder of a disk, as one process sees it.

    Args:
        root: the folder.
        process: the one that may end before each operation.
        full: when there is no room; None for never.
        power_cut: gives what is left when the power goes with the process; None if the process alone ends.
    """

    def __init__(self, root, process, *, full=None, power_cut=None):
        self._root, self._process, self._full, self._power_cut = Path(root).resolve(), process, full, power_cut
        self._left, self._active = None, True
        process.at_crash = self._keep_what_is_left
        self._fresh, self._numbers = itertools.count(), {}  # the number of an inode may be used again, these are not
        self._synced, self._removed = {}, {}
        self._names = {}  # of a folder, since it was synced: {name: number} after each change
        self.needs = 0
        self._note_all()
        for path in self._root.rglob("*"):
            self._wait_for(path)
        self._wait_for(self._root)

    def patch(self, monkeypatch):
        """Have the functions of `os` come through here."""
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))

    def need_room(self):
        """Fail if the disk is full now."""
        self.needs += 1
        if self._full is not None and 0 <= self.needs - self._full.first < self._full.count:
            raise OSError(self._full.number, os.strerror(self._full.number))

    def settle(self):
        """After the process has ended: put what it left on the real disk."""
        self._active = False
        if self._left is not None:
            shutil.rmtree(self._root)
            _write(self._root, self._left)

    def _keep_what_is_left(self):
        """Keep what is there when the process ends, as {name: bytes or dict}."""
        self._note_all()
        present = {self._number(path): path for path in self._root.rglob("*")}
        contents = self._removed | {n: None if path.is_dir() else path.read_bytes() for n, path in present.items()}
        self._left = self._folder_left(self._number(self._root), contents)

    def _watched(self, name, real):
        def operation(*args, **kwargs):
            path = self._path_of(args[1 if name == "link" else 0], kwargs)
            if not self._active or not path.is_relative_to(self._root):
                return real(*args, **kwargs)
            self._process.moment()
            if name in _NEED_ROOM:
                self.need_room()
            if name in ("unlink", "rmdir"):
                self._forget(path)
            elif name == "replace" and Path(args[1]).exists():
                self._forget(Path(args[1]).resolve())
            if name == "fsync":  # not the real one, which takes milliseconds: this class knows what is durable
                return self._wait_for(path)
            result = real(*args, **kwargs)
            self._note(path.parent)
            return result

        return operation

    def _path_of(self, where, kwargs):
        if isinstance(where, int):
            return Path(f"/proc/self/fd/{where}").readlink()
        folder = kwargs.get("dir_fd")
        base = Path.cwd() if folder is None else Path(f"/proc/self/fd/{folder}").readlink()
        return base / where

    def _number(self, path):
        inode = path.stat().st_ino
        if inode not in self._numbers:
            self._numbers[inode] = next(self._fresh)
        return self._numbers[inode]

    def _forget(self, path):
        """A name goes. What it named may come back with it."""
        self._note(path.parent)
        number = self._number(path)
        self._removed[number] = None if path.is_dir() else path.read_bytes()
        if path.is_dir() or path.stat().st_nlink == 1:
            del self._numbers[path.stat().st_ino]

    def _note(self, folder):
        """Keep the names in a folder after a change, by the number of what they name."""
        names = {path.name: self._number(path) for path in sorted(folder.iterdir())}
        states = self._names.setdefault(self._number(folder), [{}])
        if states[-1] != names:
            states.append(names)

    def _note_all(self):
        for folder in [self._root, *(path for path in self._root.rglob("*") if path.is_dir())]:
            self._note(folder)

    def _wait_for(self, path):
        """A file or folder is synced."""
        if path.is_dir():
            self._note(path)
            del self._names[self._number(path)][:-1]
        else:
            self._synced[self._number(path)] = path.read_bytes()

    def _folder_left(self, folder, contents):
        states = self._names.get(folder, [{}])  # one that was removed before anything was in it has no states
        names = self._power_cut.choice(states) if self._power_cut else states[-1]
        return {
            name: self._folder_left(number, contents)
            if contents[number] is None
            else self._file_left(contents[number], self._synced.get(number, b""))
            for name, number in names.items()
        }

    def _file_left(self, written, before):
        if not self._power_cut or written == before:
            return written
        reached = self._power_cut.randrange(len(written) + 1)
        zeros = bytes(max(0, len(written) - len(before)))  # a file may grow before its new content is there
        return self._power_cut.choice([before, written, written[:reached] + before[reached:], before + zeros])


def _write(path, content):
    if isinstance(content, bytes):
        path.write_bytes(content)
        return
    path.mkdir()
    for name, part in content.items():
        _write(path / name, part)
