"""What really crossed a host's wire, as the kernel counts it: headers of Ethernet, IP and TCP included."""

import json
import subprocess

from support.hosts import WIRE


def bytes_sent(host):
    """Bytes its interface has sent so far."""
    return _count(host, "tx")


def bytes_received(host):
    """Bytes its interface has received so far."""
    return _count(host, "rx")


def _count(host, direction):
    command = ["ip", "-n", host.name, "-s", "-j", "link", "show", "dev", WIRE]
    (interface,) = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return interface["stats64"][direction]["bytes"]
