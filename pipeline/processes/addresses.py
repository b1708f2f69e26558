"""The network interfaces of this host, and addresses with a port as users and ZeroMQ write them."""

from __future__ import annotations

import fcntl
import re
import socket
import struct
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

_PLACE = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s\[\]:/]+)):([0-9]{1,5})")


def interface_addresses() -> dict[str, list[str]]:
    """The addresses of every network interface that has one, IPv4 first, in the order of gloo's search (Linux).

    An IPv6 address of the link alone stands last: other hosts cannot use it without the name of their interface.
    """
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name, addresses in found.items():
            with suppress(OSError):  # no IPv4 address
                answer = fcntl.ioctl(any_socket.fileno(), siocgifaddr, struct.pack("256s", name.encode()))
                addresses.append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError):  # no IPv6
        lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        listed = [(IPv6Address(int(digits, 16)), name) for digits, *_, name in lines]
        for address, name in sorted(listed, key=lambda each: each[0].is_link_local):
            found.setdefault(name, []).append(str(address))
    return {name: addresses for name, addresses in found.items() if addresses}


def joined(host: str, port: int | str) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parted(place: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, where the host is a name, an IPv4 address, or an IPv6 address in brackets.

    ValueError if it is none.
    """
    found = _PLACE.fullmatch(place)
    if found is None or not 0 < int(found[3]) < 1 << 16:
        raise ValueError(f"{place!r:.80} is not HOST:PORT")
    if found[1] is not None:
        return str(IPv6Address(found[1])), int(found[3])
    return found[2], int(found[3])


def listening(address: str, port: int = 0, backlog: int | None = None) -> socket.socket:
    """A socket that listens at an address; port 0 is one that the system chooses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=backlog)


def is_address(host: str) -> bool:
    """Whether a host is an IPv4 or IPv6 address, without the name of an interface."""
    with suppress(ValueError):
        return bool(IPv6Address(host).scope_id is None if ":" in host else IPv4Address(host))
    return False
