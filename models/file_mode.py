"""Who may read a file of weights: safetensors writes through a temporary file, which is its owner's alone."""

import shutil
from pathlib import Path


def follow_umask(path: Path) -> None:
    """Give a file the mode that an ordinary new file in its folder gets."""
    ordinary = path.with_name(f"{path.name}.mode")
    ordinary.touch()
    shutil.copymode(ordinary, path)
    ordinary.unlink()
