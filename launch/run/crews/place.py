"""The meeting place, as the launcher has it: a process beside it, to which it says who comes and who is lost."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from thinwire.launch.run.crews.hub import MOST_SOCKETS
from thinwire.launch.run.heartbeat.silence import is_stopped
from thinwire.launch.run.recipe import Recipe
from thinwire.pipeline.errors import OptionsError


class MeetingPlace:
    """A started meeting place; `close` ends it.

    Args:
        recipe: that of the run.

    Raises:
        OptionsError: this system has no sockets of the kind that it needs, or a replica has too many processes.
    """

    def __init__(self, recipe: Recipe) -> None:
        if not hasattr(socket, "SOCK_SEQPACKET") or sys.platform != "linux":
            raise OptionsError("replicas.membership elastic needs Linux; use fixed elsewhere")
        if recipe.group_processes > MOST_SOCKETS:
            raise OptionsError(
                f"replicas.membership elastic needs at most {MOST_SOCKETS} processes a replica, got "
                f"{recipe.group_processes}"
            )
        self._processes = recipe.group_processes
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        numbers = [theirs.fileno(), recipe.replicas.count, recipe.group_processes, recipe.wire.timeout]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "thinwire.launch.run.crews.hub", *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the launcher
                env=dict(os.environ),
            )

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, or was stopped, and answers no more."""
        return self._process.poll() is not None or is_stopped(self._process.pid)

    @contextmanager
    def coming(self, replica: int) -> Iterator[list[int]]:
        """Say that a replica starts. Inside, its processes inherit these descriptors, one each."""
        pairs = [socket.socketpair() for _ in range(self._processes)]
        try:
            self._say({"comes": replica}, [theirs for theirs, _ in pairs])
            for theirs, _ in pairs:
                theirs.close()
            yield [ours.fileno() for _, ours in pairs]
        finally:
            for pair in pairs:
                for end in pair:
                    end.close()

    def loses(self, replica: int, *, for_good: bool) -> None:
        """Say that a replica has ended, and whether it comes again."""
        self._say({"loses": replica, "for_good": for_good})

    def stop(self) -> None:
        """Have all replicas stop after the next exchange."""
        self._say({"stop": True})

    def close(self) -> None:
        """End it."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _say(self, words: dict[str, object], sockets: Sequence[socket.socket] = ()) -> None:
        with suppress(OSError):  # it is gone, which the launcher sees
            socket.send_fds(self._control, [json.dumps(words).encode()], [each.fileno() for each in sockets])
