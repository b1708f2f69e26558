"""Files in folders that may come from elsewhere: a run, a checkpoint, an export, a tokenizer.

Such a folder may hold anything. A link would lead out of it, a pipe would wait for ever, a device has no end, and a
regular file may claim to be larger than any memory.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from thinwire.errors import ThinwireError

SIGNATURE = "written by Thinwire"
"""What a file that a user names says at its beginning, in the way of its format. Only such a file is replaced."""
MARK = "written-by-thinwire.txt"
"""The file in each folder that a run made."""
RUN_FILES = (
    *("recipe.yaml", "summary.json", "loss.png"),
    *("metrics.jsonl", "evaluations.jsonl", "exchanges.jsonl", "answers.jsonl"),
)
"""The files that a run writes into its own folder, beside what somebody else may have there."""
MOST_BYTES = 64_000_000
"""Bytes of a file that is read whole."""
MOST_OF_A_LINE = 1_000_000
"""Bytes of a line of a log."""


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """The descriptor of a regular file. OSError for a link, a pipe, a device or a folder; a link is not followed."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "it is a link, which leads out of its folder", str(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return descriptor


def opened(path: Path) -> io.BufferedReader:
    """A regular file, to be read. OSError as `open_regular`."""
    return os.fdopen(open_regular(path), "rb")


def check_regular(path: Path) -> None:
    """Raise OSError, as `open_regular`, before a library opens a file by its path."""
    os.close(open_regular(path))


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """The text of a regular file. OSError as `open_regular`, or beyond `most` bytes; ValueError if it is no UTF-8."""
    with opened(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return content.decode()


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a regular file. OSError as `read_text`; ValueError if it is none."""
    try:
        found = json.loads(read_text(path))
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(found, dict):
        raise ValueError(f"it holds no JSON object but {type(found).__name__}")
    return found


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a regular file, one after the other. OSError if one is longer than any, or as `open_regular`."""
    with opened(path) as file:
        while line := file.readline(MOST_OF_A_LINE + 1):
            if len(line) > MOST_OF_A_LINE:
                raise OSError(errno.EFBIG, f"it has a line of more than {MOST_OF_A_LINE} bytes", str(path))
            yield line.decode(errors="replace").removesuffix("\n")


@contextmanager
def as_written(path: Path, error: type[ThinwireError]) -> Iterator[None]:
    """Around code that reads a file, or takes its values apart: an error of ours if they are not what a run writes."""
    try:
        yield
    except ThinwireError:
        raise
    except (OSError, ValueError) as found:
        reason = found.strerror if isinstance(found, OSError) and found.strerror else found
        raise error(f"{path} cannot be read: {reason}; copy it again from where it was written") from found
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as found:
        raise error(
            f"{path} does not hold what a run writes: {found!r}; copy it again from where it was written"
        ) from found
