"""Probes of this machine: small questions to the system. The answer is a finding, with advice if something is missing.

A probe leaves nothing behind. `thinwire doctor` runs all probes.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, NamedTuple

from thinwire.launch.shared.control_groups import cores, free_memory
from thinwire.launch.shared.interfaces import asked, host_address
from thinwire.pipeline.processes.addresses import interface_addresses

Verdict = Literal["ok", "limited", "missing"]

# As in setup.cfg's install_requires; a test compares the two.
TORCH_OLDEST, TORCH_NEWEST = (2, 11), (2, 15)
COMMAND_SECONDS = 5.0
GIB = 2**30


class Finding(NamedTuple):
    """The answer of a probe: what it found, whether that is enough, and what the user can do."""

    found: str
    verdict: Verdict = "ok"
    advice: str = ""


def enough(condition: bool, found: str, advice: str) -> Finding:
    """The finding `ok` if the condition holds, else `limited` with the advice."""
    return Finding(found) if condition else Finding(found, "limited", advice)


def run(command: str) -> tuple[int, str]:
    """Run a command without a shell; its status and the last line that it wrote.

    It raises nothing. After `COMMAND_SECONDS` the status is 124.
    """
    try:
        result = subprocess.run(
            command.split(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_SECONDS
        )
    except subprocess.TimeoutExpired:
        return 124, f"no answer from `{command}` within {COMMAND_SECONDS:g} s"
    except OSError as error:
        return 127, f"{command.split()[0]}: {error.strerror}"
    lines = (result.stdout + result.stderr).strip().splitlines()
    return result.returncode, lines[-1] if lines else ""


def probe_python() -> Finding:
    """The version of Python. It is never too old: pip installs nothing for a Python that setup.cfg does not allow."""
    return Finding(f"{platform.python_version()}, {platform.system()} {platform.machine()}")


def probe_torch() -> Finding:
    """Whether torch can be imported, and has a version that Thinwire was tested on."""
    wanted = "install torch {}.{} to {}.{}".format(*TORCH_OLDEST, *TORCH_NEWEST)
    try:
        import torch
    except Exception as error:
        return Finding(f"{type(error).__name__}: {error}", "missing", wanted)
    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if TORCH_OLDEST <= version <= TORCH_NEWEST:
        return Finding(torch.__version__)
    return Finding(torch.__version__, "missing", wanted)


def probe_gloo() -> Finding:
    """Whether torch was built with gloo."""
    from torch import distributed

    if distributed.is_available() and distributed.is_gloo_available():
        return Finding("in torch")
    return Finding("not in this torch", "missing", "install one of torch's published wheels")


def probe_nccl() -> Finding:
    """Whether torch was built with NCCL and has a GPU to use it on."""
    from torch import cuda, distributed

    if not (distributed.is_available() and distributed.is_nccl_available()):
        return Finding("not in this torch", "missing", "use gloo, or a CUDA build of torch")
    return Finding("in torch") if cuda.is_available() else Finding("in torch, no GPU", "limited", "use gloo")


def probe_gpus() -> Finding:
    """The CUDA devices that torch can use."""
    from torch import cuda, version

    if cuda.is_available():
        devices = [cuda.get_device_properties(index) for index in range(cuda.device_count())]
        return Finding(", ".join(f"{device.name} {device.total_memory / GIB:.0f} GiB" for device in devices))
    if version.cuda is None:
        return Finding("none, torch has no CUDA", "missing", "use the CPU, or a CUDA build of torch")
    return Finding("none", "missing", "use the CPU, or see what nvidia-smi says")


def probe_transport() -> Finding:
    """What carries frames between processes on this host, and to others, with wire.transport auto."""
    from thinwire.pipeline.devices.device import num_gpus
    from thinwire.pipeline.devices.transports import advice

    return Finding(advice(num_gpus()))


def probe_cores() -> Finding:
    """The CPU cores that this process may use."""
    usable = cores()
    return enough(usable > 1, f"{usable} of {os.cpu_count()}", "stages share a core: do not trust timings")


def probe_memory() -> Finding:
    """The memory that is free without swapping."""
    found = free_memory()
    if found is None:
        return Finding("unknown", "limited", "this system does not say; a stage takes 0.7 GiB before its weights")
    available, total = (nbytes / GIB for nbytes in found)
    return enough(available >= 2, f"{available:.1f} of {total:.1f} GiB", "a stage takes 0.7 GiB before its weights")


def probe_disk() -> Finding:
    """The free space on the disk of the current folder, where a run writes by default."""
    free = shutil.disk_usage(Path.cwd()).free / GIB
    return enough(free >= 1, f"{free:.1f} GiB free here", "start from a folder on a larger disk")


def probe_open_files() -> Finding:
    """The number of files and sockets that a process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    return enough(unlimited or soft >= 1024, "no limit" if unlimited else str(soft), "ulimit -n 1024")


def probe_docker() -> Finding:
    """Whether a Docker engine answers. The client alone is not enough."""
    if not shutil.which("docker"):
        return Finding("no docker", "missing", "install Docker")
    status, answer = run("docker version --format {{.Server.Version}}")
    if status != 0:
        return Finding(f"client only: {answer}", "missing", "start the engine")
    return Finding(f"engine {answer}")


def probe_interface() -> Finding:
    """The interface and address of this host that the stages on other hosts will connect to."""
    known = interface_addresses()
    if names := asked():
        if strangers := [name for name in names if name not in known]:
            advice = f"set GLOO_SOCKET_IFNAME to {' or '.join(known)}"
            return Finding(f"no address on {', '.join(strangers)}", "missing", advice)
        chosen = {name: known[name][0] for name in names}
    else:
        address = host_address()
        loopback = "lo" if ip_address(address).is_loopback else "interface unknown"
        chosen = {next((name for name, addresses in known.items() if address in addresses), loopback): address}
    found = ", ".join(f"{name} {address}" for name, address in chosen.items())
    others = [name for name, addresses in known.items() if not ip_address(addresses[0]).is_loopback]
    if any(ip_address(address).is_loopback for address in chosen.values()):
        advice = f"on every host set GLOO_SOCKET_IFNAME, here to {' or '.join(others)}" if others else "join a network"
        return Finding(f"{found}: this host only", "limited", advice)
    unused = " or ".join(name for name in others if name not in chosen)
    return Finding(found, advice=f"to use {unused}, set GLOO_SOCKET_IFNAME" if unused else "")
