"""The network interface of this host that gloo takes.

gloo takes those that GLOO_SOCKET_IFNAME names. It fails with a line of its source code if there are none of this name.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.processes.addresses import interface_addresses

VARIABLE = "GLOO_SOCKET_IFNAME"


def host_address() -> str:
    """The default address of gloo: the first address of the host name that can be bound, else loopback."""
    with suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as trial:
                trial.bind(address)
                return str(address[0]).partition("%")[0]
    return "127.0.0.1"


def loopback() -> dict[str, str]:
    """The variable that has gloo stay on this host; none if there is no such interface."""
    known = {name for _, name in socket.if_nameindex()}
    return next(({VARIABLE: name} for name in ("lo", "lo0") if name in known), {})


def asked() -> list[str]:
    """The interfaces that the variable names; none where torch ignores it, as it does a single letter."""
    text = os.environ.get(VARIABLE, "")
    words = text.removesuffix(",").split(",") if len(text) > 1 else []
    return list(dict.fromkeys(word.partition(":")[0] for word in words))  # eth0:1 is an address of eth0


def check_interface() -> None:
    """Raise OptionsError if gloo is asked to take an interface that this host does not have."""
    known = list(interface_addresses()) or [name for _, name in socket.if_nameindex()]
    if not set(asked()) <= set(known):
        raise OptionsError(
            f"{VARIABLE} must name network interfaces of this host with an address, {', '.join(known)}; got "
            f"{os.environ[VARIABLE]}"
        )


@contextmanager
def alone() -> Iterator[None]:
    """A default process group of this process alone. It needs no network, so it stays on loopback."""
    import torch.distributed as dist

    before = os.environ.get(VARIABLE)
    os.environ.update(loopback())
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before
