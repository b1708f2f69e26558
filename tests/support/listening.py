"""Where processes listen, as ss of iproute2 tells it."""

import re
import shutil
import subprocess

import pytest

needs_ss = pytest.mark.skipif(shutil.which("ss") is None, reason="ss, of iproute2, lists who listens where")


def listening(pids):
    """The address and port of each listening socket of some processes."""
    listed = subprocess.run(["ss", "-H", "-ltnp"], check=True, capture_output=True, text=True).stdout
    found = [
        line.split()[3].rpartition(":")
        for line in listed.splitlines()
        if any(int(pid) in pids for pid in re.findall(r"pid=(\d+)", line))
    ]
    return [(address, int(port)) for address, _, port in found]
