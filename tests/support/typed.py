"""Lines of a shell as typed; those of thinwire run in forks of one process, for importing torch takes them longest."""

import os
import shlex
import sys
from pathlib import Path

from support.processes import context
from support.torchrun import said


def typed(block: str, folder: Path, **variables: str) -> str:
    """What the lines of a block print, in order; AssertionError with all it said at the first line that fails."""
    lines = block.replace("\\\n", "").splitlines()
    return "".join(_line(line, folder, variables) for line in lines if line.strip())


def _line(line, folder, variables):
    command, *arguments = shlex.split(line)
    if command != "thinwire":
        return said(["sh", "-ec", line], folder, **variables)
    printed = folder / "printed.txt"
    process = context.Process(target=_thinwire, args=(arguments, folder, variables, printed))
    process.start()
    process.join(240)
    process.kill()
    assert process.exitcode == 0, f"{line}\nended with {process.exitcode}\n{printed.read_text()}"
    return printed.read_text()


def _thinwire(arguments, folder, variables, printed):
    os.chdir(folder)
    os.environ.update(variables)
    sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    descriptor = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    from thinwire.launch.cli import main

    status = main(arguments)
    sys.stdout.flush()
    sys.exit(status)
