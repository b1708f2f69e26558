"""What takes time before a command has anything to show, in a few words on a terminal."""

from __future__ import annotations

import os
import sys


def tell(doing: str) -> None:
    """Say what happens now. Elsewhere than on a terminal nothing: what programs read stays as it is."""
    if sys.stdout.isatty() and os.environ.get("RANK", "0") == "0":
        print(f"{doing} ...", flush=True)
