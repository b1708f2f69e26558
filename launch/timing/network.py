"""The network of a prediction: links between processes and between replicas, with their bandwidth and latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, get_args

from thinwire.pipeline.frames import ChannelName

Wires = Literal["pair", "host", "home"]
"""What has a wire of its own: each direction of a link between two processes, or a host for all its links."""
WIRES: tuple[Wires, ...] = get_args(Wires)


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction between two processes that differs from the others. None is the number of the network."""

    bandwidth: float | None = None
    """Bits a second."""
    latency: float | None = None
    """Seconds."""


@dataclass(frozen=True)
class ReplicaLink:
    """One direction between the processes of two replicas that hold the same stages."""

    bandwidth: float
    """Bits a second."""
    latency: float
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
    """What has a wire; `shared_wires.py` says what each means."""
    replicas: Link = Link()
    """The links between replicas; None is the number of the network."""
    inside: Mapping[int, Link] = field(default_factory=dict)
    """By replica, all links of a pipeline that differ from those of the others."""

    def of_replica(self, replica: int) -> Network:
        """The network with the links inside a replica's pipeline."""
        if (own := self.inside.get(replica)) is None:
            return self
        return replace(
            self,
            bandwidth=self.bandwidth if own.bandwidth is None else own.bandwidth,
            latency=self.latency if own.latency is None else own.latency,
            links={},
        )

    @property
    def of_replicas(self) -> ReplicaLink:
        """The bandwidth and the latency of the links between replicas."""
        bandwidth, latency = self.replicas.bandwidth, self.replicas.latency
        return ReplicaLink(
            self.bandwidth if bandwidth is None else bandwidth, self.latency if latency is None else latency
        )

    def of(self, name: ChannelName, where: Sequence[int]) -> tuple[list[float], list[float]]:
        """The bandwidth and the latency of a channel over each boundary; `where` is the process of each stage."""
        ends = [(low, high) if name == "activations" else (high, low) for low, high in pairwise(where)]
        links = [self.links.get(pair, Link()) for pair in ends]
        return (
            [self.bandwidth if link.bandwidth is None else link.bandwidth for link in links],
            [self.latency if link.latency is None else link.latency for link in links],
        )
