"""Names in sentences: the first of many; and hints for one that is misspelt: similar names, a colon for a dot."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib.machinery import PathFinder
from pathlib import Path

_ELSEWHERE = {"gpu": "cuda"}
"""Words of other programs, with ours."""
_ALIKE = 0.65
"""How much of two names must agree; mamba and llama share 0.6."""
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def did_you_mean(name: str, known: Iterable[str], most: int = 3) -> str:
    """` (did you mean gpt2 or gpt_neo?)`, with at most so many of the known names; empty if none is similar."""
    by_folded = {one.casefold(): one for one in known}
    word = _ELSEWHERE.get(name.casefold(), "")
    found = [word] if word in by_folded else get_close_matches(name.casefold(), by_folded, n=most, cutoff=_ALIKE)
    near = [by_folded[folded] for folded in found if by_folded[folded] != name]
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def first_of(names: Sequence[str], most: int = 5) -> str:
    """The first names in a sentence, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def colon_hint(name: str) -> str:
    """` (did you mean toy:sums?)` for `toy.sums`, if there is a module `toy`; else empty.

    The user's own objects are written as `module:name`. A module in the current directory counts too.
    """
    module, _, inner = name.rpartition(".")
    return f" (did you mean {module}:{inner}?)" if _DOTTED.fullmatch(name) and _is_own(module) else ""


def _is_own(module: str) -> bool:
    """Whether a module, or the package that it is in, can be imported and is not part of Python. It is not imported."""
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names:
        return False
    try:
        found = importlib.util.find_spec(package) or PathFinder.find_spec(package, [str(Path.cwd())])
    except ValueError:  # a module that was made by hand
        return True
    return found is not None and found.origin is not None  # a folder of any name has no origin
