"""A small file system of a test's own, which is soon full."""

import subprocess
from contextlib import contextmanager

import pytest


@contextmanager
def mounted(folder, options):
    """A small file system at a folder."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"mounting takes rights that are missing here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
