"""`thinwire bench`: measurements that answer "how fast?" on this machine: of a recipe over slow links, or of codecs."""

from __future__ import annotations

from collections.abc import Sequence

_HELP = """usage: thinwire bench codecs ...
       thinwire bench RECIPE ...

  codecs     bits, error and speed of codecs, on Gaussian data and on a recipe's own tensors
  RECIPE     a recipe over slow links: codecs, uncompressed, plain torch, and the LIMIT

thinwire bench codecs --help and thinwire bench quickstart --help explain their options."""


def main(argv: Sequence[str]) -> int:
    """Run a bench; the exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_HELP)
        return 0
    if argv[0] == "codecs":
        from thinwire.launch.bench.codecs.command import main as codecs

        return codecs(argv[1:])
    from thinwire.launch.bench.links.command import main as links

    return links(argv)
