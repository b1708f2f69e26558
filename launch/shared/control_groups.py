"""What the kernel lets this process have: the limits of its control groups, and of all groups around them.

A container, a job of a scheduler and a unit of systemd are such groups, each inside others, and the smallest limit
counts. Version 1 has a tree of folders for each controller, version 2 one for all.
"""

from __future__ import annotations

import os
import resource
from collections import defaultdict
from contextlib import suppress
from pathlib import Path, PurePosixPath

MEMBERSHIP = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def machine_memory() -> int | None:
    """Bytes that all processes together can hold, swap included; None where the system does not say."""
    rows = _meminfo()
    if not {"MemTotal", "SwapTotal"} <= rows.keys():
        return None
    limits = defaultdict[str, list[int]](list)
    for folder in _groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes", "memory.swap.max", "memory.memsw.limit_in_bytes"):
            with suppress(OSError, ValueError):  # no such file, or "max"
                limits[name].append(int((folder / name).read_text()))
    held = min([rows["MemTotal"], *limits["memory.max"], *limits["memory.limit_in_bytes"]])
    swap = min([rows["SwapTotal"], *limits["memory.swap.max"]])
    return min([held + swap, *limits["memory.memsw.limit_in_bytes"]])


def free_memory() -> tuple[int, int] | None:
    """Bytes that can be taken without swapping, and the bytes of all memory; None where the system does not say."""
    rows = _meminfo()
    if not {"MemTotal", "MemAvailable"} <= rows.keys():
        return None
    free, held = [rows["MemAvailable"]], [rows["MemTotal"]]
    for folder in _groups("memory"):
        for limit, usage, idle in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with suppress(OSError, ValueError, KeyError):  # no such file, or "max"
                held.append(int((folder / limit).read_text()))
                kept = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                # pages of files that nobody has used for long go as soon as memory is wanted
                free.append(held[-1] - int((folder / usage).read_text()) + int(kept[idle]))
    return max(0, min(free)), min(held)


def cores() -> int:
    """The number of cores that this process may use, at least 1."""
    found = [float(len(os.sched_getaffinity(0)))]
    for folder in _groups("cpu"):
        with suppress(OSError, ValueError):  # no such file, or "max"
            quota, period = (folder / "cpu.max").read_text().split()
            found.append(int(quota) / int(period))
        with suppress(OSError, ValueError):
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            found += [int(quota) / int(period)] if int(quota) > 0 else []
    return max(1, int(min(found)))


def allow_many_files() -> None:
    """Let this process open as many files as the system allows any: strangers may hold connections at its ports."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a system may call it unlimited, and refuse that
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _meminfo() -> dict[str, int]:
    """The rows of /proc/meminfo, in bytes."""
    with suppress(OSError, ValueError):
        lines = [line.split() for line in MEMINFO.read_text().splitlines()]
        return {name.rstrip(":"): 2**10 * int(number) for name, number, *_ in lines}
    return {}


def _groups(controller: str) -> list[Path]:
    """The folders where the groups of this process, and those around them, may have a controller.

    In a container the path may be that of the host, of which only the root is there.
    """
    found = []
    with suppress(OSError):
        for line in MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            roots = [] if controllers else [ROOT, ROOT / "unified"]
            roots += [ROOT / controller] if controller in controllers.split(",") else []
            own = PurePosixPath(path.lstrip("/"))
            found += [root / place for root in roots for place in (own, *own.parents)]
    return found
