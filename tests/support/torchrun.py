"""A script on several processes, as a user starts it."""

import os
import subprocess
import sys
from pathlib import Path

from support.commands import free_port


def torchrun(script: Path, processes: int = 2, timeout: float = 240) -> str:
    """What a script prints on so many processes; AssertionError with what it said where it fails."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    return said([*launch, "--master-port", str(free_port()), str(script)], timeout=timeout)


def said(command: list[str], folder: Path | None = None, timeout: float = 240, **variables: str) -> str:
    """What a command prints; AssertionError with all it said where it fails."""
    environment = {**os.environ, **variables}
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=folder, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
