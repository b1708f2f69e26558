"""The conditions of a measurement: the command, the software, the machine, and its load."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from thinwire.launch.shared.control_groups import cores


def environment(command: str) -> dict[str, Any]:
    """The conditions as JSON values, for the document with the results of `command`."""
    import torch

    return {
        "command": command,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": _cpu(),
            "cores": cores(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "load": os.getloadavg()[0],
        },
    }


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")
