"""Calls of the user's own code: what goes wrong in it becomes one sentence that names it, the rule and the value."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.errors import ThinwireError


def call(
    function: Callable[..., Any], *arguments: Any, name: str, takes: str, error: type[ThinwireError], where: str = ""
) -> Any:
    """The result of the user's `function`. A `ThinwireError` that it raises passes as it is.

    Args:
        function: what the user wrote.
        arguments: its arguments, by position.
        name: what the user calls it.
        takes: its arguments in words, for the sentence.
        error: raised if it takes other arguments, or fails.
        where: what it was called for, for the sentence: "for the split 'test'".
    """
    try:
        return function(*arguments)
    except ThinwireError:
        raise
    except Exception as raised:
        if misfit := _misfit(function, arguments):
            raise error(f"{name} must take {takes}: {misfit}") from raised
        failed = f"{name} failed {where}".rstrip()
        raise error(f"{failed}: {first_line(raised)}{_place(function, raised)}") from raised


def called(function: object) -> str:
    """The path by which a user knows a function: `my_schedules.first_forwards`."""
    inner = getattr(function, "func", function)  # of a partial
    return f"{getattr(inner, '__module__', '?')}.{getattr(inner, '__qualname__', type(inner).__name__)}"


def message_of(raised: BaseException) -> str:
    """The first line of an exception's message, or two where the first is a heading; its class if it says nothing."""
    lines = [line.strip() for line in str(raised).splitlines() if line.strip()] or [type(raised).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def first_line(raised: BaseException) -> str:
    """The class of an exception, and the first line of its message as `message_of` gives it."""
    return ": ".join(dict.fromkeys([type(raised).__name__, message_of(raised)]))


def _misfit(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str | None:
    """What is wrong with the parameters of a function for these arguments; None if they fit, or cannot be known."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as misfit:
        return str(misfit)
    except ValueError:
        return None
    return None


def last_line(path: str, raised: BaseException) -> str:
    """The last line of the file at `path` that was run before `raised`: " (line 5 of lines.py)"; empty if none was."""
    lines = [frame.lineno for frame in traceback.extract_tb(raised.__traceback__) if frame.filename == path]
    return f" (line {lines[-1]} of {Path(path).name})" if lines else ""


def _place(function: Callable[..., Any], raised: BaseException) -> str:
    """The last line of the function's own file that was run; empty where there is none."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else last_line(code.co_filename, raised)
