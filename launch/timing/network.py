"""The network of a prediction: the links between processes, all alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from thinwire.launch.shared.links import parse_bandwidth, parse_latency
from thinwire.pipeline.errors import OptionsError

Wires = Literal["pair", "host"]
"""What the exchange between replicas has: a link to each replica, or one uplink of a host for all that it sends."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """The links between processes. Both directions of a link are equal."""

    bandwidth: float = float("inf")
    """Bits a second in each direction of every link."""
    latency: float = 0.0
    """Seconds, one way."""
    duplex: float = 1.0
    """Share of the bandwidth that remains in one direction while the other direction carries a frame too."""
    wires: Wires = "pair"
    """What has a wire in the exchange between replicas."""


def parse_link(text: str) -> Network:
    """Parse a link such as 100mbit or 100mbit,20ms. OptionsError for other text."""
    rate, comma, delay = text.partition(",")
    bandwidth = parse_bandwidth(rate)
    if bandwidth == 0:
        raise OptionsError(f"--link must be faster than 0, got {text!r}")
    return Network(
        bandwidth=float("inf") if bandwidth is None else 1e6 * bandwidth,
        latency=parse_latency(delay) / 1e3 if comma else 0.0,
    )
