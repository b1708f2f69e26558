"""The memory of this machine, or of the container that this process is in."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where a container finds its limit, without swap: of control groups of version 2 and of version 1."""
SWAP_LIMITS = (Path("/sys/fs/cgroup/memory.swap.max"),)
"""Where it finds the limit of its swap."""


def machine_memory() -> int | None:
    """Bytes that all processes together can hold, swap included; None where the system does not say."""
    try:
        rows = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
        held, swap = (2**10 * int(rows[key].split()[0]) for key in ("MemTotal", "SwapTotal"))
    except (OSError, KeyError, ValueError):
        return None
    return min([held, *_limits(LIMITS)]) + min([swap, *_limits(SWAP_LIMITS)])


def _limits(paths: Iterable[Path]) -> list[int]:
    found = []
    for path in paths:
        with suppress(OSError, ValueError):  # no such file, or "max"
            found.append(int(path.read_text()))
    return found
