"""The meeting place, as the launcher has it: a process beside it, to which it says who comes and who is lost."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

from thinwire.launch.run.crews.pairs import MOST_SOCKETS
from thinwire.launch.run.heartbeat.silence import is_stopped
from thinwire.launch.run.recipe import Recipe
from thinwire.pipeline.errors import OptionsError

_GRACE = 10.0
"""Seconds in which it ends by itself where somebody hurries: a proxy says the last words of its replica."""
_POLL = 0.05


class MeetingPlace:
    """A started meeting place, or the proxy to one on another host; `close` ends it.

    Args:
        recipe: that of the run.
        agreed: what replicas on several hosts must agree on.

    Raises:
        OptionsError: this system has no sockets of the kind that it needs; a replica has too many processes; or a proxy
            needs pyzmq, and it is not installed.
    """

    def __init__(self, recipe: Recipe, agreed: Mapping[str, str] = MappingProxyType({})) -> None:
        if not hasattr(socket, "SOCK_SEQPACKET") or sys.platform != "linux":
            raise OptionsError("replicas.membership elastic needs Linux; use fixed elsewhere")
        if recipe.group_processes > MOST_SOCKETS:
            raise OptionsError(
                f"replicas.membership elastic needs at most {MOST_SOCKETS} processes a replica, got "
                f"{recipe.group_processes}"
            )
        self._processes = recipe.group_processes
        self._ending: dict[str, Any] | None = None
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        module, words, given = _remote(recipe, agreed) if recipe.replicas.meeting else _beside(recipe)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"thinwire.launch.run.crews.{module}", str(theirs.fileno()), *words],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the launcher
                env=dict(os.environ),
            )
        assert self._process.stdin is not None
        with suppress(OSError), self._process.stdin as stdin:
            stdin.write(given.encode())

    @property
    def is_gone(self) -> bool:
        """Whether it has ended or says that it ends, or was stopped, and answers no more."""
        is_over = self._process.poll() is not None or is_stopped(self._process.pid)
        if self._ending is None:  # after the look at the process, whose last words are there when it has ended
            with suppress(OSError):
                self._ending = json.loads(self._control.recv(1 << 16, socket.MSG_DONTWAIT) or "null")
        return is_over or self._ending is not None

    def ending(self) -> tuple[str, bool]:
        """Why it is gone, in words; and whether starting again would not help."""
        if self._ending is not None:
            return self._ending["text"], self._ending["lasting"]
        return "the meeting place of the replicas was killed or stopped", False

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

    def end(self, hurries: Callable[[], bool]) -> None:
        """Wait until it has passed on what the replicas said last, which may take long over a slow link.

        Args:
            hurries: whether somebody wants it to end sooner.
        """
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        while not (self.is_gone or hurries()):
            time.sleep(_POLL)

    def close(self) -> None:
        """End it, if it has not ended."""
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            if not self.is_gone:
                self._process.wait(_GRACE)
        self._process.kill()
        self._process.wait()

    def _say(self, words: dict[str, object], sockets: Sequence[socket.socket] = ()) -> None:
        with suppress(OSError):  # it is gone, which the launcher sees
            socket.send_fds(self._control, [json.dumps(words).encode()], [each.fileno() for each in sockets])


def _beside(recipe: Recipe) -> tuple[str, list[str], str]:
    """The module of a meeting place on this machine, its words, and what it reads."""
    return "hub", [str(recipe.replicas.count), str(recipe.group_processes), str(recipe.wire.timeout)], ""


def _remote(recipe: Recipe, agreed: Mapping[str, str]) -> tuple[str, list[str], str]:
    """The same, of a proxy to the meeting place that the recipe names."""
    from thinwire.launch.run.crews.remote.settings import ProxySettings
    from thinwire.pipeline.backends import check_installed

    check_installed()
    replicas, wire = recipe.replicas, recipe.wire
    assert replicas.meeting is not None and replicas.number is not None and wire.keys is not None, "the recipe checks"
    settings = ProxySettings(replicas.meeting, wire.keys, replicas.number, wire.heartbeat, wire.timeout, dict(agreed))
    return "remote.proxy", [], settings.text()
