"""How many files and connections this process may have open."""

from __future__ import annotations

import resource
from contextlib import suppress


def allow_many_files() -> None:
    """Let this process open as many files as the system allows any: strangers may hold connections at its ports."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a system may call it unlimited, and refuse that
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
