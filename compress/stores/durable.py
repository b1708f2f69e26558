"""Files and folders that are on the disk when a call returns: a power cut takes nothing of them.

A disk may hold a new file and not its name. The name is in the folder, which is synced on its own.
"""

import os
import uuid
from pathlib import Path


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
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file whole: if the disk is full or the process is killed, the file is as it was before."""
    # other processes may write the same file; in containers that share the folder, all may have the same pid
    fresh = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
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


def write_for_user(path: Path, content: bytes) -> None:
    """As `write_durably`, to a path that a user names: a link stays a link, and /dev/stdout a device."""
    if path.is_relative_to("/dev") or (path.exists() and not path.is_file()):
        path.write_bytes(content)
    else:
        write_durably(path.resolve(), content)
