"""One command on each host of a cluster: started, labelled line by line, and stopped together.

A command that fails takes the others with it, after a grace time in which they may end by themselves and say what they
were waiting for; so does a signal to us, which is passed on at once.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import environ, killpg
from types import FrameType
from typing import IO

from thinwire.launch.shared.exit_codes import ended

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_SECONDS = 0.05


@contextmanager
def gathered_signals() -> Iterator[list[signal.Signals]]:
    """Collect signals instead of ending at once, so that no host is left half made or half removed."""
    came: list[signal.Signals] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(signal.Signals(number))

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Member:
    """One started command, whose output goes on to ours with a label before each line.

    Where `hushed`, what it says after a signal is dropped: Python's programs answer one with tracebacks.
    """

    def __init__(
        self, label: str, arguments: Sequence[str], environment: Mapping[str, str], *, hushed: bool = False
    ) -> None:
        self.label, self._hushed, self._signalled = label, hushed, False
        self.process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**environ, **environment},
            start_new_session=True,  # the terminal's Ctrl-C comes to us, and we pass it on
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        self._relays = [
            threading.Thread(target=self._relay, args=(source, sink), daemon=True)
            for source, sink in ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        ]
        for relay in self._relays:
            relay.start()

    def signal(self, number: signal.Signals) -> None:
        """Pass a signal on, to all that shares the command's process group."""
        self._signalled = True
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                killpg(self.process.pid, number)

    def finish(self) -> None:
        """Wait for the end, and until all output is written."""
        self.process.wait()
        for relay in self._relays:
            relay.join()

    def _relay(self, source: IO[str], sink: IO[str]) -> None:
        # where nobody reads on, closing lets the command know as a pipe would
        with source, suppress(BrokenPipeError):
            for line in source:
                if self._hushed and self._signalled:
                    continue
                sink.write(f"{self.label} | {line.rstrip()}\n")
                sink.flush()


@dataclass(frozen=True)
class Outcome:
    """How a crew ended."""

    status: int
    """Of the first that failed, or 128 and the number of the signal that came."""
    told: str
    """The same in words; empty when all went well."""


def supervise(members: Sequence[Member], came: Sequence[signal.Signals], grace: float) -> Outcome:
    """Wait until all members have ended, or the grace time is over.

    After a failure the others have `grace` seconds, then SIGTERM and as long again. A signal in `came` they get at
    once, and have `grace` seconds; at a second one they are given up. What still runs then is left to the caller.
    """
    outcome, interrupted = Outcome(0, ""), False
    orders: list[tuple[float, signal.Signals | None]] = []  # what they get when; None gives them up
    while any(member.process.poll() is None for member in members):
        now = time.monotonic()
        if len(came) > 1:
            return _interrupted(came[0])
        if came and not interrupted:
            interrupted, outcome = True, _interrupted(came[0])
            orders = [(now, came[0]), (now + grace, None)]
        elif outcome.status == 0 and (found := _failure(members)):
            outcome = found
            orders = [(now + grace, signal.SIGTERM), (now + 2 * grace, None)]
        while orders and orders[0][0] <= now:
            _, order = orders.pop(0)
            if order is None:
                return outcome
            running = [member.label for member in members if member.process.poll() is None]
            if not interrupted and running:
                outcome = Outcome(outcome.status, f"{outcome.told}; stopped {grace:g} s later: {', '.join(running)}")
            for member in members:
                member.signal(order)
        time.sleep(_POLL_SECONDS)
    return outcome if outcome.status else _failure(members) or outcome


def _interrupted(number: signal.Signals) -> Outcome:
    return Outcome(128 + number, f"stopped by {number.name}")


def _failure(members: Sequence[Member]) -> Outcome | None:
    """The first of them that has failed, with the status that a shell would give."""
    for member in members:
        if code := member.process.poll():
            return Outcome(128 - code if code < 0 else code, f"{member.label} failed first: it {ended(code)}")
    return None
