"""The network of a prediction: links between processes and between replicas, with their bandwidth and latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, get_args

from thinwire.pipeline.frames import ChannelName

Wires = Literal["pair", "host"]
"""What the exchange between replicas has: a link to each replica, or one uplink of a host for all that it sends."""
WIRES: tuple[Wires, ...] = get_args(Wires)


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link that differs from the others. None is the number of the network."""

    bandwidth: float | None = None
    """Bits a second."""
    latency: float | None = None
    """Seconds."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """The links between processes. Both directions of a link are equal, except those in `links`."""

    bandwidth: float = float("inf")
    """Bits a second in each direction of every link."""
    latency: float = 0.0
    """Seconds."""
    duplex: float = 1.0
    """Share of the bandwidth that remains in one direction while the other direction carries a frame too."""
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    """The directions that differ, by (sending process, receiving process)."""
    wires: Wires = "pair"
    """What has a wire in the exchange between replicas."""
    replicas: Link = Link()
    """The links between replicas; None is the number of the network."""

    def filled(self, link: Link) -> tuple[float, float]:
        """The bandwidth and the latency of a link."""
        return (
            self.bandwidth if link.bandwidth is None else link.bandwidth,
            self.latency if link.latency is None else link.latency,
        )

    def of(self, name: ChannelName, where: Sequence[int]) -> list[tuple[float, float]]:
        """The bandwidth and the latency of a channel over each boundary; `where` is the process of each stage."""
        ends = [(low, high) if name == "activations" else (high, low) for low, high in pairwise(where)]
        return [self.filled(self.links.get(pair, Link())) for pair in ends]
