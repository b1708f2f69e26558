"""The ends of a stage's boundaries, as one object: a call goes to the channels of both neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.compress import Coder, Microbatch
from thinwire.pipeline.wire.boundary import BoundaryEnd, ChannelEnd


@dataclass
class StageEnds:
    """The ends of one stage; None where there is no neighbour, or before the stage is connected."""

    upstream: BoundaryEnd | None = None
    """The end of the boundary to the stage before."""
    downstream: BoundaryEnd | None = None
    """The end of the boundary to the stage after."""

    def __iter__(self) -> Iterator[BoundaryEnd]:
        return (end for end in (self.upstream, self.downstream) if end is not None)

    @property
    def channels(self) -> list[ChannelEnd]:
        """The end of each channel, upstream first."""
        return [channel_end for end in self for channel_end in (end.outgoing, end.incoming)]

    def begin(self, microbatches: Sequence[Microbatch]) -> None:
        """Open a pass at every boundary."""
        for end in self:
            end.begin(microbatches)

    def flush(self) -> None:
        """Wait until all sent frames have left; PeerError if a neighbour is gone or silent.

        Of stages on GPUs: NonFiniteError or WireError if what they sent or received is not finite.
        """
        for end in self:
            end.outgoing.flush()
            end.incoming.confirm()

    def digests(self) -> dict[str, str]:
        """A hash of every buffer at the ends, by name; the other ends have the same."""
        return {name: digest for end in self.channels for name, digest in end.digests().items()}

    def state_dict(self) -> dict[str, Any]:
        """The state of the ends, by boundary and channel."""
        return {_name(end): end.state_dict() for end in self.channels}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take exactly the state that `state_dict` returned; before there were ends, that was empty."""
        for end in self.channels:
            end.load_state_dict(state[_name(end)] if state else {})

    def coders(self) -> dict[str, Coder]:
        """The coders at the ends, by boundary, channel and tensor."""
        return {
            f"boundary-{end.channel.boundary}-{end.channel.name}-{index}": coder
            for end in self.channels
            for index, coder in enumerate(end.coders)
        }

    def close(self) -> None:
        """Close the stores of feedback."""
        for end in self.channels:
            end.close()


def _name(end: ChannelEnd) -> str:
    return f"{end.channel.boundary} {end.channel.name}"
