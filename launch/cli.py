"""The `thinwire` command: one word picks what to do, and only that is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

COMMANDS = {
    "train": "train a recipe, a process a stage",
    "simulate": "train a recipe in one process, with the same numbers",
    "trace": "turn the recorded steps of a run into a trace for Perfetto",
    "report": "write one HTML page about runs and tables",
    "predict": "say how fast a recipe will be over which links, and what would help",
    "cluster": "run a command on several hosts on this machine, with slow links between them",
    "bench": "measure codecs on this machine",
    "recipes": "list the packaged recipes",
    "doctor": "say what this machine can do, and what is missing for what",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help"):
        print(_help())
        return 0
    if command not in COMMANDS:
        print(f"thinwire has no command {command!r}; known: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return _load(command)(arguments[1:])
    except KeyboardInterrupt:
        return 130


def _load(command: str) -> Callable[[Sequence[str]], int]:
    if command == "train":
        from thinwire.launch.train import main as train

        return train
    if command == "simulate":
        from thinwire.launch.simulate import main as simulate

        return simulate
    if command == "trace":
        from thinwire.launch.trace import main as trace

        return trace
    if command == "report":
        from thinwire.launch.report import main as report

        return report
    if command == "predict":
        from thinwire.launch.predict import main as predict

        return predict
    if command == "cluster":
        from thinwire.launch.cluster import main as cluster

        return cluster
    if command == "bench":
        from thinwire.launch.bench import main as bench

        return bench
    if command == "recipes":
        return _recipes
    from thinwire.launch.doctor import main as doctor

    return doctor


def _recipes(argv: Sequence[str]) -> int:
    from rich.console import Console
    from rich.table import Table

    from thinwire.launch.recipe import packaged

    table = Table("recipe", "what it is for")
    for name, description in packaged().items():
        table.add_row(name, description)
    Console().print(table)
    return 0


def _help() -> str:
    lines = [f"  {name:<10} {purpose}" for name, purpose in COMMANDS.items()]
    return "\n".join(
        ["usage: thinwire COMMAND ...", "", *lines, "", "thinwire train --help explains every field of a recipe."]
    )
