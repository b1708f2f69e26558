"""Lengths and intervals of training as a user writes them: "20 epochs" or "500 steps"."""

import re

_DURATION = re.compile(r"\d+ (epochs?|steps?)")


def misspelt(name: str, duration: str) -> list[str]:
    """What is wrong with a duration, if anything."""
    return (
        [] if _DURATION.fullmatch(duration) else [f'{name} must be like "20 epochs" or "500 steps", got {duration!r}']
    )


def is_due(duration: str, done: int, steps_per_epoch: int) -> bool:
    """Whether something that happens every so often happens after `done` steps."""
    number, in_epochs = read_duration(duration)
    every = number * steps_per_epoch if in_epochs else number
    return done > 0 and every > 0 and done % every == 0


def read_duration(duration: str) -> tuple[int, bool]:
    """The number, and whether it counts epochs."""
    number, unit = duration.split()
    return int(number), unit.startswith("epoch")
