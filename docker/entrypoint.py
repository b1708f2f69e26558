"""Limit what this container sends to BANDWIDTH, LATENCY and LOSS, then run its command without any privilege.

Needs NET_ADMIN for the limits, and SETUID, SETGID and SETPCAP to give everything up.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from thinwire.launch.hosts.shaping import egress
from thinwire.launch.shared.links import Links, parse_bandwidth, parse_latency, parse_loss
from thinwire.pipeline.errors import OptionsError

USER = "thinwire"


def limits(environment: Mapping[str, str]) -> list[list[str]]:
    """The commands that limit the interface which gloo uses."""
    links = Links(
        num_hosts=1,
        bandwidth=parse_bandwidth(environment.get("BANDWIDTH") or "none"),
        latency=parse_latency(environment.get("LATENCY") or "0ms"),
        loss=parse_loss(environment.get("LOSS") or "0%"),
    )
    return egress(environment.get("GLOO_SOCKET_IFNAME", "eth0"), links)


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
