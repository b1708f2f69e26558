"""What a command prints that must end well, and a script on two processes."""

import sys
from pathlib import Path

from support.commands import TIMEOUT, completed, free_port, started


def on_two_processes(script: Path, folder: Path, *arguments: str) -> str:
    """What a script prints where two processes have the variables of torchrun; AssertionError where one fails."""
    rendezvous = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, script, *arguments]
    with (
        started(command, folder, RANK="0", **rendezvous) as first,
        started(command, folder, RANK="1", **rendezvous) as second,
    ):
        assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr
        return first.stdout + second.stdout


def said(command: list, folder: Path, timeout: float = TIMEOUT, **variables: str) -> str:
    """What a command prints in a folder; AssertionError with all it said where it fails."""
    ended = completed(command, folder, timeout, **variables)
    assert ended.status == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout
