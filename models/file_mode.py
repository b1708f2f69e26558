"""Permissions of weight files. safetensors writes through a temporary file that only its owner can read."""

import shutil
from pathlib import Path


def follow_umask(path: Path) -> None:
    """Give a file the permissions of an ordinary new file in its folder."""
    ordinary = path.with_name(f"{path.name}.mode")
    ordinary.touch()
    shutil.copymode(ordinary, path)
    ordinary.unlink()
