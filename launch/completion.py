"""`thinwire completion SHELL`: a script with which a shell completes commands, options and names of recipes.

    thinwire completion bash > ~/.local/share/bash-completion/completions/thinwire

`shtab` writes the script from one argparse parser. This file makes that parser from those of all commands.
"""

from __future__ import annotations

from argparse import Action, ArgumentParser
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, get_args, get_origin

from thinwire.launch.cli import COMMANDS
from thinwire.launch.run.fields import explained
from thinwire.launch.run.recipe import SHORT_OPTIONS, Recipe, packaged
from thinwire.launch.shared.arguments import Parser
from thinwire.launch.shared.exit_codes import OK
from thinwire.pipeline.errors import OptionsError

SHELLS = ("bash", "zsh", "fish")


def main(argv: Sequence[str]) -> int:
    """Print the script, and return the exit status."""
    options = make_parser().parse_args(argv)
    if find_spec("shtab") is None:
        raise OptionsError("thinwire completion needs shtab; install it with pip install 'thinwire[completion]'")
    import shtab

    print(shtab.complete(all_commands(), options.shell))
    return OK


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser(prog="thinwire completion", description="Print a script for the completion of a shell.")
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"one of {', '.join(SHELLS)}")
    return parser


def all_commands() -> ArgumentParser:
    """One parser with the options of every command of Thinwire."""
    whole = ArgumentParser(prog="thinwire")
    whole.add_argument("--version", action="store_true", help="print the version")
    commands = whole.add_subparsers(metavar="COMMAND")
    for name, (module, purpose) in COMMANDS.items():
        described = import_module(f"thinwire.launch.{module}").make_parser()
        made = commands.add_parser(name, help=purpose, parents=[described], add_help=False, conflict_handler="resolve")
        if getattr(described, "takes_recipe", False):
            _add_recipe(made)
        for action in made._actions:
            _complete_values(action)
    return whole


def _add_recipe(parser: ArgumentParser) -> None:
    """Add the options of a recipe, and RECIPE if the command has no argument for it."""
    if not parser._get_positional_actions():
        parser.add_argument("recipe", metavar="RECIPE", help="packaged name or path of a YAML file")
    known = parser._option_string_actions
    for option in SHORT_OPTIONS:
        if option not in known:
            parser.add_argument(option, help="short for other options; see --help")
    for _, name, kind, _, said in explained(Recipe):
        if f"--{name}" not in known:
            choices = get_args(kind) if get_origin(kind) is Literal else None
            parser.add_argument(f"--{name}", help=said.replace("%", "%%"), choices=choices)


def _complete_values(action: Action) -> None:
    """Let a shell complete files, folders or recipes where the help names one, and the names of schedules."""
    import shtab

    from thinwire.pipeline.schedules import SCHEDULES

    if action.dest in ("schedule", "pipeline.schedule"):
        action.choices = tuple(SCHEDULES)

    kinds: dict[Any, Any] = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY, "RUN": shtab.DIRECTORY, "RECIPE": _recipes()}
    if action.metavar in kinds:
        action.complete = kinds[action.metavar]  # type: ignore[attr-defined]


@cache
def _recipes() -> dict[str, Any]:
    """Functions of each shell that complete packaged recipes and files."""
    names = " ".join(packaged())
    return {
        "bash": "_thinwire_recipes",
        "zsh": "_thinwire_recipes",
        "fish": f"{names} (__fish_complete_path (commandline -ct))",
        "preamble": {
            "bash": f'_thinwire_recipes() {{ compgen -W \'{names}\' -- "$1"; compgen -f -- "$1"; }}',
            "zsh": f"_thinwire_recipes() {{ _alternative 'recipes:recipe:({names})' 'files:file:_files' }}",
        },
    }
