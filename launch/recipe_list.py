"""`thinwire recipes`: the packaged recipes, and what each is for."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from thinwire.launch.run.recipe import packaged


def main(argv: Sequence[str]) -> int:
    """Print the table; the exit status."""
    if argv:
        print(f"thinwire recipes takes no arguments, got {' '.join(argv)}", file=sys.stderr)
        return 2
    table = Table("recipe", "what it is for")
    for name, description in packaged().items():
        table.add_row(name, description)
    Console().print(table)
    return 0
