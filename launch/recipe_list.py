"""`thinwire recipes`: the packaged recipes, and the purpose of each."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.launch.recipe.recipe import packaged
from thinwire.launch.shared.arguments import Parser
from thinwire.launch.shared.exit_codes import OK
from thinwire.launch.shared.tables import Table, show


def main(argv: Sequence[str]) -> int:
    """Print the table, and return the exit status."""
    make_parser().parse_args(argv)
    show([Table("the packaged recipes", ("recipe", "purpose"), list(packaged().items()))])
    return OK


def make_parser() -> Parser:
    """A parser without options."""
    return Parser(prog="thinwire recipes", description="List the packaged recipes.")
