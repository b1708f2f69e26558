"""The process beside the launcher of elastic replicas: their membership server, or the way to one on another host.

    python -m thinwire.launch.run.elastic.agent      with its AgentSettings as the first line of standard input

A launcher must have one thread, because it forks its stage processes, and ZeroMQ starts threads. So it writes what it
says of its replicas as lines of JSON to this process, which answers with the place of the server and a key, and with
the reason if it ends before its launcher does.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.launch.run.heartbeat import is_stopped
from thinwire.launch.run.recipe import Recipe
from thinwire.pipeline.errors import OptionsError

if TYPE_CHECKING:
    from thinwire.pipeline.replicas.membership.messages import Message

_POLL = 0.05
_GRACE = 10.0
"""Seconds in which it ends by itself: the last messages of its replica may be on their way."""
_AGAIN = 0.5
"""Seconds after which a launcher asks again whether the other one of its replica has gone."""


@dataclass(frozen=True)
class AgentSettings:
    """What an agent must know."""

    replicas: int
    processes: int
    heartbeat: float
    timeout: float
    place: str | None
    """Where the server listens; None if it is to be this process."""
    keys: str | None = None
    """The file of keys."""
    replica: int = 0
    """The one of this host, where the server is on another one."""
    agreed: Mapping[str, str] | None = None
    """What all replicas must agree on."""


class Agent:
    """A started agent, as the launcher has it; `close` ends it.

    `agreed` is what replicas on several hosts must agree on.

    Raises:
        OptionsError: the system is not Linux.
    """

    def __init__(self, recipe: Recipe, agreed: Mapping[str, str]) -> None:
        if sys.platform != "linux":
            raise OptionsError("replicas.membership elastic needs Linux; use fixed elsewhere")
        replicas, wire, place = recipe.replicas, recipe.wire, recipe.replicas.server
        remote = {"keys": wire.keys, "replica": replicas.number, "agreed": dict(agreed)} if place else {}
        settings = AgentSettings(replicas.count, recipe.group_processes, wire.heartbeat, wire.timeout, place, **remote)  # type: ignore[arg-type]
        self._lives: dict[int, str] = {}
        self._ending: dict[str, Any] | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-m", "thinwire.launch.run.elastic.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the launcher
        )
        self._send(asdict(settings))
        self._server: dict[str, str] = self._received(wait=True) or {}
        if "text" in self._server:
            self._ending = self._server

    @property
    def is_gone(self) -> bool:
        """Whether it has ended or says that it ends, or was stopped, and answers no more."""
        is_over = self._process.poll() is not None or is_stopped(self._process.pid)
        self._ending = self._ending or self._received()  # after the look at the process, whose end it sent before
        return is_over or self._ending is not None

    def ending(self) -> tuple[str, bool]:
        """Why it is gone, in words; and whether starting again would not help."""
        if self._ending is not None:
            return self._ending["text"], self._ending["lasting"]
        return "the membership server of the replicas was killed or stopped", False

    def comes(self, replica: int) -> str:
        """Say that a replica starts; what its processes need to reach the server, as text."""
        life = self._lives[replica] = secrets.token_hex(8)
        self._send({"kind": "comes", "replica": replica, "life": life})
        return json.dumps({**self._server, "replica": replica, "life": life})

    def loses(self, replica: int, *, for_good: bool) -> None:
        """Say that a replica has ended, and whether it comes again."""
        self._send({"kind": "loses", "replica": replica, "life": self._lives[replica], "for_good": for_good})

    def stop(self) -> None:
        """Have all replicas stop after the next exchange."""
        for replica in self._lives:
            self._send({"kind": "stop", "replica": replica})

    def end(self, hurries: Callable[[], bool]) -> None:
        """Wait until it has passed on the last messages, unless somebody hurries."""
        self._send({"kind": "end"})
        while not (self.is_gone or hurries()):
            time.sleep(_POLL)

    def close(self) -> None:
        """End it, if it has not ended."""
        self._send({"kind": "end"})
        with suppress(subprocess.TimeoutExpired):
            if not self.is_gone:
                self._process.wait(_GRACE)
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()

    def _send(self, words: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it is gone, which the launcher sees
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()

    def _received(self, *, wait: bool = False) -> dict[str, Any] | None:
        """The next line of the agent, if there is one."""
        pipe = self._process.stdout
        assert pipe is not None
        if not wait and not select.select([pipe], [], [], 0)[0]:
            return None
        line = pipe.readline()
        return json.loads(line) if line else None


def report(text: str) -> None:
    """Print a sentence for the user."""
    with suppress(OSError):  # the terminal may be gone
        print(text, file=sys.stderr, flush=True)


def _answer(**words: object) -> None:
    with suppress(OSError):
        print(json.dumps(words), flush=True)


def _lines(is_over: Callable[[], object]) -> Iterator[dict[str, Any]]:
    """What the launcher says, until it says the end, or it is over."""
    left = b""
    while not is_over():
        if not select.select([0], [], [], _POLL)[0]:
            continue
        data = os.read(0, 1 << 16)
        *lines, left = (left + data).split(b"\n")
        for words in map(json.loads, lines):
            if words["kind"] == "end":
                return
            yield words
        if not data:
            return


def _serve(settings: AgentSettings) -> None:
    """Be the membership server of the replicas of this machine."""
    from thinwire.pipeline.processes.zeromq.keys import Keys
    from thinwire.pipeline.replicas.membership.listening import listen
    from thinwire.pipeline.replicas.membership.server import Size

    keys = Keys.fresh()
    size = Size(settings.replicas, settings.processes, settings.timeout, settings.timeout)
    server, mesh = listen("127.0.0.1", "*", keys, size, None, 1 << 62, report)
    _answer(place=mesh.place, secret=keys.secret.decode())
    for words in _lines(lambda: mesh.broken):
        mesh.ask(partial(server.launch, words))
    if mesh.broken is not None:
        sys.exit(mesh.broken)
    mesh.close()


class LauncherClient:
    """Speaks for the launcher of one replica to a membership server on another host."""

    def __init__(self, settings: AgentSettings) -> None:
        from thinwire.pipeline.processes.zeromq.keys import Keys
        from thinwire.pipeline.replicas.membership.client import Client
        from thinwire.pipeline.replicas.membership.messages import WELCOMED

        assert settings.place is not None and settings.keys is not None, "the recipe checks"
        self._settings, self._held = settings, list[dict[str, Any]]()
        self._is_welcome = False
        self._waits_since: float | None = None
        keys, wire = Keys.read(Path(settings.keys)), (settings.heartbeat, settings.timeout)
        self.client = Client(settings.place, keys, *wire, WELCOMED, self._take, report)
        self.secret = keys.secret.decode()
        self._greet()

    def send(self, words: dict[str, Any]) -> None:
        """Pass on what the launcher says, as soon as it is welcome."""
        self.client.later(0, partial(self._pass_on, words))

    def _greet(self) -> None:
        words = {"replica": self._settings.replica, "agreed": self._settings.agreed}
        self.client.send({"kind": "launcher", **words})

    def _pass_on(self, words: dict[str, Any]) -> None:
        if self._is_welcome:
            self.client.send(words)
        else:
            self._held.append(words)

    def _take(self, message: Message) -> None:
        words, _ = message
        place, replica, timeout = self._settings.place, self._settings.replica, self._settings.timeout
        if words["kind"] == "welcome":
            noted = f"; {words['noted']}" if words["noted"] else ""
            report(f"replica {replica} is connected to the membership server at {place}{noted}")
            self._is_welcome = True
            for held in self._held:
                self.client.send(held)
        elif words["kind"] == "refused":
            self.client.end(f"the membership server at {place} refuses this replica: {words['text']}")
        else:
            if self._waits_since is None:
                self._waits_since = time.monotonic()
                report(f"{words['text']}; this one waits until it is gone, and then comes")
            if time.monotonic() - self._waits_since > timeout:
                self.client.end(
                    f"the membership server at {place} let this replica wait for {timeout:g} s (wire.timeout), because "
                    f"{words['text']}; end the other one, or give this host another replicas.number"
                )
            self.client.later(_AGAIN, self._greet)


def _connect(settings: AgentSettings) -> None:
    """Speak for the launcher until it has sent all, or there is no server any more; then why."""
    ours = LauncherClient(settings)
    _answer(place=settings.place, secret=ours.secret)
    for words in _lines(lambda: ours.client.ending):
        ours.send(words)
    if (ending := ours.client.ending) is not None:
        _answer(**asdict(ending))
    ours.client.close()


def main() -> None:
    """Serve or connect, and report why to the launcher if it ends before the launcher does."""
    from thinwire.launch.run import parent

    parent.end_with_parent()
    first = b""
    while not first.endswith(b"\n"):
        first += os.read(0, 1)
    settings = AgentSettings(**json.loads(first))
    try:
        _serve(settings) if settings.place is None else _connect(settings)
    except OptionsError as error:
        _answer(text=str(error), lasting=True)


if __name__ == "__main__":
    main()
