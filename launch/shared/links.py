"""The links of a cluster: bandwidth, latency and loss, as text and as numbers.

Hosts are counted from 0, like stages. All that a host sends shares its bandwidth, and so does all that it receives. A
link with its own bandwidth shares it with no other link.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from thinwire.pipeline.errors import OptionsError

MAX_HOSTS = 250
BANDWIDTHS = "10gbit,1gbit,500mbit,300mbit,100mbit"
"""Those of links where nobody names others: Table 2 of 2206.01299."""
_MBIT = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_LINK = re.compile(r"(\d+)([->])(\d+):(.+)")


@dataclass(frozen=True, kw_only=True)
class Links:
    """The network between `num_hosts` hosts."""

    num_hosts: int = 2
    """The number of hosts; a cable joins each to one switch."""
    bandwidth: float | None = None
    """Mbit/s that a host can send, and Mbit/s that it can receive; None is no limit."""
    latency: float = 0.0
    """Milliseconds from one host to another, each way."""
    loss: float = 0.0
    """The share of packets that is lost."""
    overrides: Mapping[tuple[int, int], float | None] = field(default_factory=lambda: MappingProxyType({}))
    """Mbit/s from one host to another, by (from, to), instead of `bandwidth`."""

    def __post_init__(self) -> None:
        rates, known = (self.bandwidth, *self.overrides.values()), f"the hosts 0 to {self.num_hosts - 1}"
        OptionsError.require(
            (1 <= self.num_hosts <= MAX_HOSTS, f"hosts must be from 1 to {MAX_HOSTS}, got {self.num_hosts}"),
            (self.latency >= 0, f"latency must not be negative, got {self.latency:g} ms"),
            (0 <= self.loss < 1, f"loss must be at least 0 and below 100%, got {100 * self.loss:g}%"),
            *(
                (0.01 <= rate <= 1e5, f"a bandwidth must be from 10kbit to 100gbit, or none, got {rate:g} Mbit/s")
                for rate in rates
                if rate is not None
            ),
            *(
                (low < high < self.num_hosts, f"a link must join two of {known}, got {low} and {high}")
                for low, high in map(sorted, self.overrides)
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Network:
    """The links of a prediction, all alike. Both directions of a link are equal."""

    bandwidth: float = float("inf")
    """Bits a second in each direction of every link."""
    latency: float = 0.0
    """Seconds, one way."""
    duplex: float = 1.0
    """Share of the bandwidth that remains in one direction while the other direction carries a frame too."""


def parse_bandwidth(text: str) -> float | None:
    """Mbit/s from text such as 500kbit, 100mbit, 10gbit; None from "none"."""
    if text.strip().lower() == "none":
        return None
    return _measure(text, _MBIT, "a bandwidth", "500kbit, 100mbit, 1gbit, or none")


def parse_latency(text: str) -> float:
    """Milliseconds from text such as 500us, 20ms, 1s."""
    return _measure(text, _MS, "a latency", "500us, 20ms or 1s")


def parse_loss(text: str) -> float:
    """A share from text such as 0.1% or 1%."""
    return _measure(text, {"%": 0.01}, "a loss", "0.1% or 1%")


def parse_overrides(texts: Iterable[str]) -> dict[tuple[int, int], float | None]:
    """The bandwidths of single links: 1-2:20mbit both ways, 1>2:20mbit from host 1 to host 2. The last one counts."""
    overrides: dict[tuple[int, int], float | None] = {}
    for text in texts:
        match = _LINK.fullmatch(text)
        if match is None:
            raise OptionsError(f"a link must be like 1-2:20mbit, or 1>2:20mbit for one direction, got {text!r}")
        here, there, rate = int(match[1]), int(match[3]), parse_bandwidth(match[4])
        overrides[here, there] = rate
        if match[2] == "-":
            overrides[there, here] = rate
    return overrides


def _measure(text: str, units: Mapping[str, float], what: str, examples: str) -> float:
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(units)})", text.strip().lower())
    if match is None:
        raise OptionsError(f"{what} must be like {examples}, got {text!r}")
    return float(match[1]) * units[match[2]]
