"""A lane: what one replica of a stage sends to the owner of a part, or an owner to all replicas.

The description that both ends have alike, as a channel of a boundary has one. The fields of a frame's header say:

    channel      parts, to an owner or to all, or sums, from an owner
    boundary     the stage
    microbatch   bucket * replicas + the replica that sends
    step         the optimizer step
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from thinwire.compress import Key, Microbatch
from thinwire.pipeline.frames import Header
from thinwire.pipeline.measuring.spans import Work
from thinwire.pipeline.wire.channel import Channel
from thinwire.pipeline.wire.passes import phase_of

GRADIENTS = "gradients of the weights"
OUTER_GRADIENTS = "outer gradients of the weights (what they moved since the last exchange)"
STATISTICS = "running statistics of batch norms"


@dataclass(frozen=True)
class Lane(Channel):
    """One lane of one bucket; `boundary` is the stage."""

    bucket: int
    replica: int
    """The replica that sends."""
    to: int | None
    """The replica that receives, at its end; None are all."""
    to_all: bool
    """Whether every replica gets the frame."""
    replicas: int
    """Their number."""
    carries: str = GRADIENTS
    """What travels, in words."""

    def __post_init__(self) -> None:
        self.method.check_channel("gradients")

    @property
    def sender(self) -> str:
        """Who sends, in words."""
        return f"replica {self.replica} of stage {self.boundary}"

    @property
    def receiver(self) -> str:
        """Who receives, in words."""
        return "its replicas" if self.to is None else f"replica {self.to} of stage {self.boundary}"

    def header(self, microbatch: Microbatch, nbytes: int) -> Header:
        """The header of one step's frame of `nbytes`."""
        return replace(super().header(microbatch, nbytes), microbatch=self._number)

    def key(self, microbatch: Microbatch, tensor: int) -> Key:
        """The source of randomness of one step: every replica, part and bucket has another."""
        phase = phase_of(microbatch.kind)
        owner = -1 if self.to_all or self.to is None else self.to
        return Key(self.seed, self.boundary, f"{self.name} {owner}", phase, microbatch.step, self._number, tensor)

    def work(self, microbatch: Microbatch) -> Work:
        """A frame in the terms of a trace; it crosses no boundary, so it has none."""
        return Work(self.name, microbatch.step)

    @property
    def flushing(self) -> Work:
        """Waiting until sent frames have left, in the terms of a trace."""
        return Work(f"flush of {self.name}")

    def describe(self, microbatch: Microbatch) -> str:
        """A frame in words, for errors."""
        sums = "sums of the " if self.name == "sums" else ""
        return f"{sums}{self.carries}, bucket {self.bucket}, optimizer step {microbatch.step}"

    @property
    def _number(self) -> int:
        return self.bucket * self.replicas + self.replica
