"""A plan of faults for one attempt at a run, drawn from a seed."""

import errno
from dataclasses import dataclass, field

from support.faults.disk import Full
from support.faults.links import DAMAGES


@dataclass(frozen=True)
class Extent:
    """What an undisturbed attempt has: moments to end at, frames, and disk operations that need room."""

    moments: int
    frames: int
    needs: int


@dataclass(frozen=True)
class Plan:
    """The faults of one attempt."""

    crash_at: int | None = None
    """The moment at which the process ends."""
    power_cut: bool = False
    """Whether its end takes what was not durable."""
    frames: dict[int, str] = field(default_factory=dict)
    """What happens to a frame, by its number."""
    full: Full | None = None
    """When the disk is full."""

    def __str__(self):
        faults = [
            self.crash_at and f"{'power cut' if self.power_cut else 'killed'} at moment {self.crash_at}",
            *(f"frame {number} {damage}" for number, damage in self.frames.items()),
            self.full and f"full disk from {self.full.first} for {self.full.count}",
        ]
        return ", ".join(fault for fault in faults if fault) or "undisturbed"


def drawn(draw, extent):
    """One or two kinds of faults anywhere in an attempt."""
    kinds = draw.choice(["killed", "power cut", "frames", "full", "killed full", "power cut full", "frames full"])
    frames, full = {}, None
    if "frames" in kinds:
        frames = {draw.randint(1, extent.frames): draw.choice(DAMAGES) for _ in range(draw.randint(1, 2))}
    if "full" in kinds:
        numbers = (errno.ENOSPC, errno.EDQUOT)
        full = Full(draw.randint(1, extent.needs), draw.choice((1, 2, 10, 1000)), draw.choice(numbers))
    ends = "killed" in kinds or "power" in kinds
    return Plan(draw.randint(1, extent.moments) if ends else None, "power" in kinds, frames, full)
