"""Files and folders that are on the disk when a call returns: a power cut takes nothing of them.

A disk may hold a new file and not its name. The name is in the folder, which is synced on its own.
"""

import errno
import os
import re
import uuid
from pathlib import Path

from thinwire.errors.files import SIGNATURE

_BEGINNING = 1000
"""Bytes at the beginning of a file."""
_PART = ".thinwire-part"


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, if they are not there; wait until their names are on the disk."""
    if not path.is_dir():
        if not path.parent.exists():
            make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def part_of(path: Path) -> Path:
    """The path for the new content of a file until it is whole, which no other process and nobody else has."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}{_PART}")


def remove_parts(folder: Path) -> None:
    """Remove the files in a folder that killed processes were writing, by the names that `part_of` gave them."""
    for path in folder.glob(f"*{_PART}"):
        if re.fullmatch(rf".+\.[0-9a-f]{{32}}{re.escape(_PART)}", path.name):
            path.unlink(missing_ok=True)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file whole: if the disk is full or the process is killed, the file is as it was before."""
    fresh = part_of(path)
    try:
        with fresh.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    sync(path.parent)  # the new name must reach the disk too


def write_own(path: Path, content: bytes) -> None:
    """As `write_durably`, a file that says at its beginning who wrote it, as `SIGNATURE` does.

    A file that is there and does not say so is somebody else's: FileExistsError.
    """
    assert SIGNATURE.encode() in content[:_BEGINNING], "it must be known as our own the next time"
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise FileExistsError(errno.EEXIST, "it is a link, a folder or a device", str(path))
    if path.exists():
        with path.open("rb") as file:
            if (begins := file.read(_BEGINNING)) and SIGNATURE.encode() not in begins:
                raise FileExistsError(errno.EEXIST, "it is there, and Thinwire did not write it", str(path))
    write_durably(path, content)


def write_for_user(path: Path, content: bytes) -> None:
    """As `write_own`, to a path that a user names: a link stays a link, and /dev/stdout a device."""
    if path.is_relative_to("/dev") or (path.exists() and not path.is_file()):
        path.write_bytes(content)
    else:
        write_own(path.resolve(), content)
