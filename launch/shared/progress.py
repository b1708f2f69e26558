"""Short messages on a terminal while a command prepares its work and has nothing else to show."""

from __future__ import annotations

import os
import sys


def tell(doing: str) -> None:
    """Print what happens now, if the output is a terminal. Other output is for programs, so it gets no such lines."""
    if sys.stdout.isatty() and os.environ.get("RANK", "0") == "0":
        print(f"{doing} ...", flush=True)
