"""Lines of a shell as typed; those of thinwire are forks, because importing torch takes them longest."""

import shlex
from pathlib import Path

from support.commands import THINWIRE
from support.scripts import said


def typed(block: str, folder: Path, **variables: str) -> str:
    """What the lines of a block print, in order; AssertionError with all it said at the first line that fails."""
    lines = block.replace("\\\n", "").splitlines()
    return "".join(_line(line, folder, variables) for line in lines if line.strip())


def _line(line, folder, variables):
    command, *arguments = shlex.split(line)
    words = [*THINWIRE, *arguments] if command == "thinwire" else ["sh", "-ec", line]
    return said(words, folder, **variables)
