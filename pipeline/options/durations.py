"""Durations and intervals of training, as a user writes them: "20 epochs" or "500 steps"."""

import re

_DURATION = re.compile(r"[0-9]{1,12} (epochs?|steps?)")


def misspelt(name: str, duration: str) -> list[str]:
    """A list with the mistake in a duration; empty if it is right. `name` is the dotted name of the field."""
    return (
        []
        if _DURATION.fullmatch(duration)
        else [f'{name} must be like "20 epochs" or "500 steps", got {duration[:60]!r}']
    )


def is_due(duration: str, done: int, steps_per_epoch: int) -> bool:
    """Whether an action with the interval `duration` is due after `done` steps. Never, if the interval is 0."""
    every = in_steps(duration, steps_per_epoch)
    return done > 0 and every > 0 and done % every == 0


def is_over(duration: str, step: int, steps_per_epoch: int) -> bool:
    """Whether `duration` is over before optimizer step `step`, counted from 0."""
    return step >= in_steps(duration, steps_per_epoch)


def in_steps(duration: str, steps_per_epoch: int) -> int:
    """A duration in optimizer steps."""
    number, in_epochs = read_duration(duration)
    return number * steps_per_epoch if in_epochs else number


def read_duration(duration: str) -> tuple[int, bool]:
    """The number in a duration, and whether it counts epochs."""
    number, unit = duration.split()
    return int(number), unit.startswith("epoch")
