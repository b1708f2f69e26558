"""Output that may lose its reader: a long run must not end because a terminal closed, or the disk of a log is full."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Lasting(io.FileIO):
    """A file descriptor that drops what it cannot write."""

    def write(self, content: ReadableBuffer) -> int:
        """Write; if that fails, say that all was written."""
        try:
            return super().write(content)
        except OSError:
            return len(memoryview(content))


@contextmanager
def lasting() -> Iterator[None]:
    """Inside, what cannot be printed is dropped: to a closed terminal, a pipe without a reader, a full disk."""
    with redirect_stdout(_lasting(sys.stdout)) as output, redirect_stderr(_lasting(sys.stderr)) as errors:
        try:
            yield
        finally:
            output.flush()
            errors.flush()


def _lasting(stream: TextIO) -> TextIO:
    """The stream as one that drops what it cannot write. One that is no file, as in a notebook, stays as it is."""
    try:
        descriptor = stream.fileno()
    except OSError:
        return stream
    stream.flush()
    raw = _Lasting(descriptor, "w", closefd=False)
    at_once = getattr(stream, "write_through", False)  # PYTHONUNBUFFERED
    return io.TextIOWrapper(
        raw if at_once else io.BufferedWriter(raw),  # as Python itself does
        stream.encoding,
        stream.errors,
        line_buffering=bool(stream.line_buffering),
        write_through=at_once,
    )
