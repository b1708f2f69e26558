"""The commands of `ip` and `tc` that make a cluster's network, as lists. Nothing here runs them.

    host 0               switch                host 1            each box is a network namespace,
    +--------+     +-----------------+     +--------+            so the machine's own network stays
    |   wire +-----+ port0     port1 +-----+ wire   |            as it is
    +--------+     |      bridge     |     +--------+
     10.0.0.1      +-----------------+      10.0.0.2

Packets from a host are shaped at its wire; packets to a host are shaped at its port. If no link has its own bandwidth,
the shape is a token bucket (tbf). In the bucket of the wire is netem, for latency and loss. It sees packets as they go
over the wire, after the kernel has cut them:

    root tbf -- netem

If links have their own bandwidths, an htb chooses a class by the address of the other host. It limits nothing itself:

    root htb -+- 1:1, the rest  -- tbf -- netem
              +- 1:2, one link  -- tbf -- netem
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from thinwire.launch.shared.links import Links

INTERFACE = "wire"
"""The interface of a host."""
SWITCH = "switch"
"""The name of the switch's namespace; other namespaces have the index of their host."""

Command = list[str]

_NO_LIMIT = "100gbit quantum 60000"
_QUEUE_SECONDS = 0.4
_UNLIMITED_PACKETS = 100_000
_PACKET_BYTES = 1514
# TCP sends up to 64 kB in one piece. If a bucket is smaller, the kernel cuts the piece into packets of 1514 bytes, as a
# network card does. But a bucket must hold the bytes that it gathers while the kernel's timer is late. With 200 us,
# one stream reached 0.95 of the rate from 20 Mbit/s to 10 Gbit/s (headers leave 0.96); with 100 us it reached 0.86 at
# 1 Gbit/s.
_BURST_SECONDS, _LEAST_BURST_BYTES = 200e-6, 4000


def name(prefix: str, host: int | str) -> str:
    """The name of a namespace."""
    return f"{prefix}-{host}"


def address(host: int) -> str:
    """The IPv4 address of a host."""
    return f"10.0.0.{host + 1}"


def creation(prefix: str, num_hosts: int) -> list[Command]:
    """Commands that make the namespaces, their cables and the bridge, without limits."""
    switch = name(prefix, SWITCH)
    lines = [
        f"ip netns add {switch}",
        f"ip -n {switch} link add bridge type bridge",
        f"ip -n {switch} link set bridge up",
    ]
    for host in range(num_hosts):
        here, port = name(prefix, host), _port(host)
        lines += [
            f"ip netns add {here}",
            f"ip -n {here} link add {INTERFACE} type veth peer name {port} netns {switch}",
            f"ip -n {switch} link set {port} master bridge up",
            f"ip -n {here} addr add {address(host)}/24 dev {INTERFACE}",
            f"ip -n {here} link set lo up",
            f"ip -n {here} link set {INTERFACE} up",
        ]
    return [line.split() for line in lines]


def shaping(prefix: str, links: Links) -> list[Command]:
    """Commands that give every link its bandwidth, latency and loss. The network must be unshaped."""
    lines = []
    for host in range(links.num_hosts):
        sent = {there: rate for (here, there), rate in links.overrides.items() if here == host}
        received = {here: rate for (here, there), rate in links.overrides.items() if there == host}
        lines += _shape(f"-n {name(prefix, host)}", f"dev {INTERFACE}", links, "dst", sent, delayed=True)
        lines += _shape(f"-n {name(prefix, SWITCH)}", f"dev {_port(host)}", links, "src", received, delayed=False)
    return [line.split() for line in lines]


def unshaping(prefix: str, links: Links) -> list[Command]:
    """Commands that undo `shaping`."""
    roots = (command for command in shaping(prefix, links) if command[3] == "qdisc" and "root" in command)
    return [[*command[:4], "del", *command[5:8]] for command in roots]


def egress(interface: str, links: Links) -> list[Command]:
    """Commands that shape what this host sends over one interface, as in a container."""
    return [line.split() for line in _shape("", f"dev {interface}", links, "dst", {}, delayed=True)]


def kinds(links: Links) -> list[str]:
    """The queueing disciplines that `shaping` needs from the kernel, each with options for a probe."""
    limited = any(rate is not None for rate in (links.bandwidth, *links.overrides.values()))
    wanted = {
        "tbf rate 10mbit burst 32kb latency 50ms": limited,
        "htb": bool(links.overrides),
        "netem delay 1ms": bool(links.latency or links.loss),
    }
    return [kind for kind, needed in wanted.items() if needed]


def _shape(
    where: str, device: str, links: Links, other_is: str, overrides: Mapping[int, float | None], *, delayed: bool
) -> list[str]:
    """Commands that shape one device. `other_is` is src or dst: which address of a packet is that of the other host."""

    def bucket(parent: str, handle: int, rate: float | None) -> list[str]:
        return [
            f"tc {where} qdisc add {device} {place} {kind}"
            for place, kind in zip(
                [f"{parent} handle {handle:x}:", f"parent {handle:x}: handle {handle + 1:x}:"],
                [*_tbf(rate), *(_netem(links, rate) if delayed else [])],
                strict=False,
            )
        ]

    if not overrides:
        return bucket("root", 1, links.bandwidth)
    lines = [f"tc {where} qdisc add {device} root handle 1: htb default 1"]
    for number, (other, rate) in enumerate([(None, links.bandwidth), *sorted(overrides.items())], start=1):
        lines.append(f"tc {where} class add {device} parent 1: classid 1:{number:x} htb rate {_NO_LIMIT}")
        if other is not None:
            match = f"u32 match ip {other_is} {address(other)}/32"
            lines.append(f"tc {where} filter add {device} parent 1: protocol ip prio 1 {match} flowid 1:{number:x}")
        lines += bucket(f"parent 1:{number:x}", 16 * number, rate)
    return lines


def _tbf(rate: float | None) -> list[str]:
    if rate is None:
        return []
    bits = round(rate * 1e6)
    burst = max(_LEAST_BURST_BYTES, math.ceil(bits / 8 * _BURST_SECONDS))
    return [f"tbf rate {bits}bit burst {burst}b latency {_QUEUE_SECONDS * 1000:.0f}ms"]


def _netem(links: Links, rate: float | None) -> list[str]:
    if not (links.latency or links.loss):
        return []
    seconds = _QUEUE_SECONDS + links.latency / 1000
    packets = _UNLIMITED_PACKETS if rate is None else math.ceil(rate * 1e6 / 8 * seconds / _PACKET_BYTES)
    loss = f" loss {links.loss * 100:g}%" if links.loss else ""
    return [f"netem limit {packets} delay {links.latency * 1000:g}us{loss}"]


def _port(host: int) -> str:
    return f"port{host}"
