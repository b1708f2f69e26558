"""A script on several processes, as a user starts it."""

import os
import socket
import subprocess
import sys
from pathlib import Path


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
