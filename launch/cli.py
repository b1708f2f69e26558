"""The `thinwire` command: the first word picks a command, and only the module of that command is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points, version

from thinwire.errors import ThinwireError
from thinwire.launch.shared.exit_codes import MISTAKE, OK, UNREAD, StoppedError, status_of

Main = Callable[[Sequence[str]], int]
"""A function from arguments to an exit status. It raises `ThinwireError` for mistakes and failures."""

COMMANDS: Mapping[str, tuple[str, str]] = {
    "train": ("train", "train a recipe, a process a stage"),
    "simulate": ("simulate", "train a recipe in one process, with the same numbers"),
    "partition": ("partition", "show what each layer of a recipe costs, and where to cut"),
    "predict": ("predict.command", "predict the speed of a recipe over slow links"),
    "cluster": ("cluster", "run a command on several simulated hosts with slow links, all on this machine"),
    "bench": ("bench.command", "measure codecs, or a recipe over slow links, on this machine"),
    "trace": ("report.perfetto", "turn the recorded steps of a run into a trace for Perfetto"),
    "report": ("report.command", "write one HTML page about runs and measurements"),
    "export": ("export", "write a run's model for the library it came from"),
    "eval": ("evaluate", "score a model on held-out samples, with compression on and off"),
    "recipes": ("recipe_list", "list the packaged recipes"),
    "doctor": ("doctor", "check this machine"),
}
"""By name: the module of `thinwire.launch` that has the command's `main`, and the purpose of the command."""

COMMAND_GROUP = "thinwire.commands"
"""The entry points by which another package brings a command: name = module:function, a `Main`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name, and return its exit status."""
    try:
        status = _main(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # as from `thinwire --help | head -1`
        # what is still buffered goes nowhere, or Python would complain of it at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    return status


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help"):
        print(_help())
        return OK
    if command == "--version":
        print(f"thinwire {version('thinwire')}")
        return OK
    if command not in COMMANDS and command not in _installed():
        return _tell(f"thinwire has no command {command!r}; known: {', '.join([*COMMANDS, *_installed()])}", MISTAKE)
    return run(lambda rest: _load(command)(rest), arguments[1:])


def run(command: Main, arguments: Sequence[str]) -> int:
    """Run a command and return its exit status. A `ThinwireError` is printed as a sentence, without a traceback."""
    try:
        return command(arguments)
    except KeyboardInterrupt:
        error: ThinwireError = StoppedError("stopped by SIGINT")
    except ThinwireError as raised:
        error = raised
    return _tell(str(error), status_of(error))


def _tell(sentence: str, status: int) -> int:
    print(sentence, file=sys.stderr)
    return status


def _installed() -> dict[str, EntryPoint]:
    """The commands that other installed packages bring, by name."""
    return {found.name: found for found in entry_points(group=COMMAND_GROUP)}


def _load(command: str) -> Main:
    if command not in COMMANDS:
        own: Main = _installed()[command].load()
        return own
    found: Main = import_module(f"thinwire.launch.{COMMANDS[command][0]}").main
    return found


def _help() -> str:
    lines = [f"  {name:<10} {purpose}" for name, (_, purpose) in COMMANDS.items()]
    for name, found in _installed().items():
        lines.append(f"  {name:<10} comes from {found.dist.name if found.dist else found.value}")
    closing = ["thinwire train --help explains every field of a recipe; thinwire --version says which one this is."]
    return "\n".join(["usage: thinwire COMMAND ...", "", *lines, "", *closing])
