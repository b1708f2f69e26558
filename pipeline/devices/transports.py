"""What carries the frames of two neighbouring processes: gloo through the host, or NCCL from GPU to GPU."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire.pipeline.devices.device import DeviceName
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.processes.backends import TRANSPORTS


@dataclass(frozen=True)
class Location:
    """Where a process computes."""

    host: str
    gpu: str | None
    """The identity of its GPU; None on the CPU."""

    @classmethod
    def of(cls, device: torch.device) -> Location:
        """That of this process. NCCL_HOSTID names the host in place of its own name, as it does for NCCL."""
        host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
        if device.type == "cpu":
            return cls(host, None)
        return cls(host, str(torch.get_device_module(device).get_device_properties(device).uuid))

    @property
    def words(self) -> str:
        """This place in words, such as `GPU 1 of host 0`, or `CPU of host 0`."""
        return self.gpu or f"CPU of {self.host}"


def carrying(wanted: str, pair: tuple[int, int], locations: Sequence[Location]) -> tuple[str, str]:
    """The transport of two processes, and why.

    Args:
        wanted: that of `wire.transport`.
        pair: the two processes.
        locations: where each process computes.

    Raises:
        OptionsError: nccl is wanted, and cannot be.
    """
    if not TRANSPORTS[wanted].over_gpus:
        return wanted, "as wished"
    one, other = (locations[process] for process in pair)
    on_cpu = [process for process in pair if locations[process].gpu is None]
    shared = one.gpu is not None and one == other
    if wanted == "nccl" and on_cpu:
        raise OptionsError(
            f"wire.transport nccl needs a GPU in every process, and process {on_cpu[0]} computes on the CPU; add "
            f"--training.device cuda, or --wire.transport gloo"
        )
    if wanted == "nccl" and shared:
        raise OptionsError(
            f"wire.transport nccl needs a GPU for every process, and processes {pair[0]} and {pair[1]} share one of "
            f"{one.host}; start fewer processes there, or add --wire.transport gloo"
        )
    if wanted == "nccl":
        return "nccl", "as wished"
    if on_cpu:
        return "gloo", f"process {on_cpu[0]} computes on the CPU"
    if shared:
        return "gloo", "they share a GPU"
    return ("nccl", "two GPUs of one host") if one.host == other.host else ("gloo", "two hosts")


def placed(processes: int, gpus: Sequence[int], device: DeviceName) -> list[Location]:
    """Where processes would compute, as many on each host, on hosts with so many GPUs each.

    Raises:
        OptionsError: the processes cannot be divided among the hosts, or a GPU is wanted on a host without one.
    """
    each, left = divmod(processes, len(gpus))
    without = ", ".join(str(host) for host, count in enumerate(gpus) if device == "cuda" and not count)
    OptionsError.require(
        (min(gpus) >= 0, f"--gpus must be numbers of GPUs, got {min(gpus)}"),
        (not left, f"--gpus must name hosts with as many processes each, got {len(gpus)} hosts for {processes}"),
        (
            not without,
            f"training.device cuda needs a GPU on each host, and there is none on host {without}; "
            f"add --training.device auto, which takes the CPU there, or --training.device cpu",
        ),
    )
    taken = [0 if device == "cpu" else count for count in gpus]
    return [
        Location(f"host {host}", f"GPU {place % count} of host {host}" if count else None)
        for host, count in enumerate(taken)
        for place in range(each)
    ]


def advice(gpus: int) -> str:
    """What `auto` would take between the processes of this host, with so many GPUs, and to other hosts."""
    if gpus == 0:
        return "gloo for each pair: there is no GPU"
    if gpus == 1:
        return "gloo for each pair: processes share the GPU"
    return f"nccl on two of the {gpus} GPUs; gloo on one GPU, and between hosts"
