"""Lists in sentences: one way to write them."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: `a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def numbered(noun: str, numbers: Collection[int]) -> str:
    """Numbered things in a sentence: `stage 1`, `stages 1 and 2`."""
    return f"{noun}{'s' * (len(numbers) != 1)} {listed([str(number) for number in sorted(numbers)])}"


def were(stages: Collection[int]) -> str:
    """The subject of a sentence on what stages did: `stage 1 was`, `stages 1 and 2 were`."""
    return f"{numbered('stage', stages)} {'was' if len(stages) == 1 else 'were'}"
