"""Limit what this container sends to BANDWIDTH, LATENCY and LOSS, then run its command without any privilege.

Needs NET_ADMIN for the limits, and SETUID, SETGID and SETPCAP to give everything up.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from thinwire.launch.shared.links import parse_bandwidth, parse_latency
from thinwire.pipeline.errors import OptionsError

USER = "thinwire"


def limits(environment: Mapping[str, str]) -> list[list[str]]:
    """The commands that limit the interface which gloo uses: a token bucket, and netem in it for latency and loss."""
    add = f"tc qdisc add dev {environment.get('GLOO_SOCKET_IFNAME', 'eth0')}"
    rate, latency = parse_bandwidth(environment.get("BANDWIDTH") or "none"), environment.get("LATENCY") or "0ms"
    loss, lines = environment.get("LOSS") or "0%", []
    if rate is not None:
        # 200 us of the rate: what comes while the kernel's timer is late
        burst = max(4000, math.ceil(rate * 1e6 / 8 * 200e-6))
        lines.append(f"{add} root handle 1: tbf rate {round(rate * 1e6)}bit burst {burst}b latency 400ms")
    if parse_latency(latency) or loss != "0%":
        place = "root handle 1:" if rate is None else "parent 1: handle 2:"
        lost = "" if loss == "0%" else f" loss {loss}"
        lines.append(f"{add} {place} netem limit 100000 delay {1000 * parse_latency(latency):g}us{lost}")
    return [line.split() for line in lines]


def unprivileged(command: Sequence[str]) -> list[str]:
    """A command as a user that cannot get any privilege back."""
    identity = ["--reuid", USER, "--regid", USER, "--init-groups"]
    return ["setpriv", *identity, "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", *command]


def main(command: Sequence[str]) -> None:
    """Shape, then become the command."""
    try:
        for limit in limits(os.environ):
            subprocess.run(limit, check=True, capture_output=True, text=True)
    except OptionsError as error:
        sys.exit(str(error))
    except subprocess.CalledProcessError as error:
        advice = "BANDWIDTH needs NET_ADMIN; LATENCY and LOSS need the host's kernel to have netem (modprobe sch_netem)"
        sys.exit(f"`{' '.join(error.cmd)}`: {error.stderr.strip()}; {advice}")
    os.environ["HOME"] = f"/home/{USER}"
    words = unprivileged(command)
    os.execvp(words[0], words)


if __name__ == "__main__":
    main(sys.argv[1:])
