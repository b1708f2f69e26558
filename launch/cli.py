"""The `thinwire` command. Its first argument names a command, and only the module of that command is imported.

Every command, and `thinwire --help`, waits for the imports of this file. So slow imports are inside functions here.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from thinwire.errors import ThinwireError, ThinwireWarning
from thinwire.launch.shared.exit_codes import FAILED, MISTAKE, OK, UNREAD, FailedError, StoppedError, status_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

Main = Callable[[Sequence[str]], int]
"""A function from arguments to an exit status. It raises `ThinwireError` for mistakes and failures."""

COMMANDS: Mapping[str, tuple[str, str]] = {
    "train": ("train", "train a recipe, with its stages in several processes"),
    "simulate": ("simulate", "train a recipe in one process, with the same numbers"),
    "outline": ("outline", "write what processes must know of data that they never read"),
    "predict": ("predict.command", "predict the speed of a recipe over slow links, and find its best cut"),
    "study": ("study.command", "run many recipes, and compare them with published numbers"),
    "report": ("report", "compare runs on one HTML page"),
    "export": ("export", "write the model of a run for the library that it came from"),
    "eval": ("evaluate", "score a model on held-out samples, with compression on and off"),
    "generate": ("generate", "let the cut model of a run or a recipe write text"),
    "recipes": ("recipe_list", "list the packaged recipes"),
    "keys": ("keys", "make the keys that let the processes of a run reach each other, and nobody else"),
    "doctor": ("doctor.command", "check this machine, and its links to others"),
}
"""By name: the module of `thinwire.launch` that has the command's `main`, and the purpose of the command."""

REFUSALS = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EFBIG),
}
"""Answers of the system about a file that its user can change: rights, a full disk, a file where a folder is needed."""

_FULL = {errno.ENOSPC, errno.EDQUOT}

_INTERRUPTED = "stopped by SIGINT"

_LONG_WORD = re.compile(r"(\S{300})\S{300,}")

_FORMAT_OF_PYTHON = warnings.formatwarning

COMMAND_GROUP = "thinwire.commands"
"""The group of entry points with which another package adds a command: name = module:function, a `Main`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name, and return its exit status."""
    put_right()
    try:
        status = _main(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # as from `thinwire --help | head -1`
        # send buffered output to /dev/null, or Python prints an error when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _print_error(f"the output, or a file, cannot be written: {error.strerror}; free some space", FAILED)
    except KeyboardInterrupt:  # outside of the command itself
        return _print_error(_INTERRUPTED, status_of(StoppedError()))
    return status


def put_right() -> None:
    """Open standard streams that are closed, print what a terminal cannot show as escapes, and get news of children.

    A file that is opened next takes the number of a closed stream, and gets what is printed. Where the parent ignores
    SIGCHLD, the kernel does not keep how a child ended.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - it stays open
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) == "strict":
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help"):
        print(_help())
        return OK
    if command == "--version":
        from importlib.metadata import version

        print(f"thinwire {version('thinwire')}")
        return OK
    if command not in COMMANDS:
        if command not in (others := _installed()):
            from thinwire.errors.names import did_you_mean

            known = [*COMMANDS, *others]
            hint = did_you_mean(command, known)
            return _print_error(f"thinwire has no command {command!r}{hint}; known: {', '.join(known)}", MISTAKE)
        for sentence in _clashes(command):
            print(sentence, file=sys.stderr)
    return run(lambda rest: _load(command)(rest), arguments[1:])


def run(command: Main, arguments: Sequence[str]) -> int:
    """Run a command and return its exit status.

    A `ThinwireError` is printed as a sentence, without a traceback, and a `ThinwireWarning` without a line of code.
    """
    put_right()
    warnings.formatwarning = _shown
    try:
        return command(arguments)
    except KeyboardInterrupt:
        error: ThinwireError = StoppedError(_INTERRUPTED)
    except ThinwireError as raised:
        error = raised
    except OSError as raised:
        if raised.errno not in REFUSALS or raised.filename is None:
            raise
        error = FailedError(f"{raised.filename} cannot be used: {raised.strerror}")
    return _print_error(str(error), status_of(error))


def _shown(message: Warning | str, category: type[Warning], *place: Any, **line: Any) -> str:
    """A warning as it is printed."""
    is_ours = issubclass(category, ThinwireWarning)
    return f"warning: {message}\n" if is_ours else _FORMAT_OF_PYTHON(message, category, *place, **line)


def _print_error(sentence: str, status: int) -> int:
    """Print a sentence without what a terminal would act on; of a word that is very long, only the beginning."""
    shown = "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in sentence)
    print(_LONG_WORD.sub(r"\1...", shown), file=sys.stderr)
    return status


def _entries() -> EntryPoints:
    """The commands that other installed packages say they have."""
    from importlib import metadata  # takes as long as all else that a command of Thinwire imports first

    return metadata.entry_points(group=COMMAND_GROUP)


def _installed() -> dict[str, EntryPoint]:
    """The commands of other installed packages, by name. If two have the same name, the first."""
    found: dict[str, EntryPoint] = {}
    for entry in _entries():
        if entry.name not in COMMANDS:
            found.setdefault(entry.name, entry)
    return found


def _clashes(command: str | None = None) -> list[str]:
    """A sentence for each installed command (or for `command` alone) whose name another command has."""
    taken = dict.fromkeys(COMMANDS, "Thinwire")
    sentences = []
    for entry in _entries():
        owner = taken.setdefault(entry.name, _package(entry))
        if owner != _package(entry) and command in (None, entry.name):
            sentences.append(
                f"thinwire {entry.name} is the command of {owner}, and that of {_package(entry)} ({entry.value}) is "
                "left out; give its entry point another name"
            )
    return sentences


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.value


def _load(command: str) -> Main:
    if command in COMMANDS:
        found: Main = import_module(f"thinwire.launch.{COMMANDS[command][0]}").main
        return found
    import inspect

    from thinwire.errors.calls import first_line

    entry = _installed()[command]
    name = f"the command {command} of {_package(entry)}, {entry.value},"
    try:
        own = entry.load()
    except (Exception, SystemExit) as error:
        raise ThinwireError(f"{name} cannot be loaded: {first_line(error)}; see its pyproject.toml") from error
    if not callable(own):
        raise ThinwireError(f"{name} must be a function, got {type(own).__name__}")
    try:
        inspect.signature(own).bind([])
    except TypeError as error:
        raise ThinwireError(f"{name} must take one argument, the list of words after {command}: {error}") from error
    return partial(_status, name, own)


def _status(name: str, own: Main, arguments: Sequence[str]) -> int:
    """Run another package's command; its exit status."""
    status = own(arguments)
    if type(status) is not int:
        raise FailedError(
            f"{name} must return its exit status, an int, and returned {status!r}; 0 says that all went well"
        )
    return status


def _help() -> str:
    lines = [f"  {name:<10} {purpose}" for name, (_, purpose) in COMMANDS.items()]
    for name, entry in _installed().items():
        purpose = entry.dist.metadata["Summary"] if entry.dist else None
        lines.append(
            f"  {name:<10} {purpose} (from {_package(entry)})" if purpose else f"  {name:<10} from {_package(entry)}"
        )
    closing = ["thinwire train --help explains every field of a recipe; thinwire --version prints the version."]
    return "\n".join(["usage: thinwire COMMAND ...", "", *lines, "", *_clashes(), *closing])
