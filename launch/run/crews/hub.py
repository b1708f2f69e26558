"""The meeting place of replicas that may be lost: a process of the launcher, which passes frames on.

    python -m thinwire.launch.run.crews.hub DESCRIPTOR REPLICAS PROCESSES TIMEOUT

It needs the standard library only, and starts at once.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import suppress

from thinwire.launch.run import parent
from thinwire.launch.run.crews.pairs import Pairs
from thinwire.pipeline.replicas.membership.meeting import Meeting


def tell(text: str) -> None:
    """Tell the user a sentence."""
    with suppress(OSError):  # the terminal may be gone
        print(text, file=sys.stderr, flush=True)


def main(descriptor: str, replicas: str, processes: str, timeout: str) -> None:
    """Be the meeting place until the launcher is gone."""
    parent.end_with_parent()
    pairs = Pairs(socket.socket(fileno=int(descriptor)))
    asyncio.run(pairs.serve(Meeting(int(replicas), int(processes), float(timeout), pairs.answer, tell)))


if __name__ == "__main__":
    main(*sys.argv[1:])
