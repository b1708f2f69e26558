"""`thinwire bench`: measurements that answer "how fast, and how good?" on this machine, one bench to a question."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType


def main(argv: Sequence[str]) -> int:
    """Run one bench, or list them; the exit status."""
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name not in BENCHES:
        print(f"thinwire bench has no {name!r}; known: {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    return BENCHES[name][1](argv[1:])


def _codecs(argv: Sequence[str]) -> int:
    from thinwire.launch.codec_bench import main as codecs

    return codecs(argv)


BENCHES: Mapping[str, tuple[str, Callable[[Sequence[str]], int]]] = MappingProxyType(
    {"codecs": ("bits, error and speed of codecs, on Gaussian data and on a recipe's own tensors", _codecs)}
)
"""Every bench by name: what it tells, and what runs it, which imports only what it needs."""


def _help() -> str:
    lines = [f"  {name:<10} {purpose}" for name, (purpose, _) in BENCHES.items()]
    return "\n".join(
        ["usage: thinwire bench NAME ...", "", *lines, "", "thinwire bench NAME --help explains its options."]
    )
