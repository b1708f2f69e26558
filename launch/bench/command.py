"""`thinwire bench`: measure how fast codecs are, or how fast a recipe trains over slow links."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from thinwire.launch.shared.exit_codes import OK

_HELP = """usage: thinwire bench codecs ...
       torchrun ... -m thinwire bench RECIPE ...

  codecs     bits, noise and speed of codecs on Gaussian data
  RECIPE     speed of a recipe over the links between its processes: each codec, no compression, and plain torch

If your own recipe is called codecs, give its path: thinwire bench ./codecs.yaml.
thinwire bench codecs --help and thinwire bench quickstart --help explain the options."""


def main(argv: Sequence[str]) -> int:
    """Run a bench, and return the exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_HELP)
        return OK
    bench, rest = ("codecs", argv[1:]) if argv[0] == "codecs" else ("links", argv)
    status: int = import_module(f"thinwire.launch.bench.{bench}.command").main(rest)  # only the bench that runs
    return status
