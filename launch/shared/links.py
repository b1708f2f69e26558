"""Links between hosts: bandwidth and latency, as text and as numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from thinwire.pipeline.errors import OptionsError

BANDWIDTHS = "10gbit,1gbit,500mbit,300mbit,100mbit"
"""Those of links where nobody names others: Table 2 of 2206.01299."""
_MBIT = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


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


def _measure(text: str, units: Mapping[str, float], what: str, examples: str) -> float:
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(units)})", text.strip().lower())
    if match is None:
        raise OptionsError(f"{what} must be like {examples}, got {text!r}")
    return float(match[1]) * units[match[2]]
