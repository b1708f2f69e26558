"""What carries the frames of two neighbouring processes: gloo through the host, or NCCL from card to card."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from thinwire.pipeline.errors import OptionsError

Carrying = Literal["gloo", "nccl"]


@dataclass(frozen=True)
class Location:
    """Where a process computes."""

    host: str
    card: str | None
    """The identity of its card; None on the CPU."""

    @classmethod
    def of(cls, device: torch.device) -> Location:
        """That of this process. NCCL_HOSTID names the host in place of its own name, as it does for NCCL."""
        host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
        if device.type == "cpu":
            return cls(host, None)
        return cls(host, str(torch.get_device_module(device).get_device_properties(device).uuid))

    def to_json(self) -> dict[str, Any]:
        """As a JSON value."""
        return asdict(self)


def carrying(wanted: str, pair: tuple[int, int], locations: Sequence[Location]) -> tuple[Carrying, str]:
    """The transport of two processes, and why.

    Args:
        wanted: auto, gloo or nccl.
        pair: the two processes.
        locations: where each process computes.

    Raises:
        OptionsError: nccl is wanted, and cannot be.
    """
    if wanted == "gloo":
        return "gloo", "as wished"
    one, other = (locations[process] for process in pair)
    on_cpu = [process for process in pair if locations[process].card is None]
    shared = one.card is not None and one == other
    if wanted == "nccl" and on_cpu:
        raise OptionsError(
            f"wire.transport nccl needs a card in every process, and process {on_cpu[0]} computes on the CPU; add "
            f"--training.device cuda, or --wire.transport gloo"
        )
    if wanted == "nccl" and shared:
        raise OptionsError(
            f"wire.transport nccl needs a card for every process, and processes {pair[0]} and {pair[1]} share one of "
            f"{one.host}; start fewer processes there, or add --wire.transport gloo"
        )
    if wanted == "nccl":
        return "nccl", "as wished"
    if on_cpu:
        return "gloo", f"process {on_cpu[0]} computes on the CPU"
    if shared:
        return "gloo", "they share a card"
    return ("nccl", "two cards of one host") if one.host == other.host else ("gloo", "two hosts")


def advice(cards: int) -> str:
    """What `auto` would take between the processes of this host, with so many cards, and to other hosts."""
    if cards == 0:
        return "gloo for each pair: there is no card"
    if cards == 1:
        return "gloo for each pair: processes share the card"
    return f"nccl on two of the {cards} cards; gloo on one card, and between hosts"
