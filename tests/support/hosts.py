"""The hosts of examples/slow_links.py: namespaces of this machine, with links of a chosen speed between them."""

import importlib.util
import os
import shutil
import subprocess
import sys

from support.pages import ROOT

_spec = importlib.util.spec_from_file_location("slow_links", ROOT / "examples/slow_links.py")
slow_links = sys.modules["slow_links"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(slow_links)

WIRE, hosts = slow_links.WIRE, slow_links.hosts


def missing():
    """Why this machine can have no such hosts; empty if it can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces and traffic control"
    if absent := [tool for tool in ("ip", "tc") if not shutil.which(tool)]:
        return f"needs {' and '.join(absent)} of iproute2"
    try:
        with hosts(2, "100mbit"):
            return ""
    except subprocess.CalledProcessError as error:
        return f"needs network namespaces with tc: {error.stderr.strip()}"


def made_by(pid):
    """The namespaces that a process made."""
    return {name for name in slow_links._namespaces() if name.startswith(f"{slow_links.PREFIX}-{pid}-")}


def processes_in(host):
    """The pids of all processes on a host."""
    return [int(pid) for pid in slow_links.run(f"ip netns pids {host.name}").split()]
