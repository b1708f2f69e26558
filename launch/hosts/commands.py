"""One command on each host of a cluster: started together, stopped together, with a label before each line of output.

When a command fails, the others get a grace time to end and to say what they were waiting for; then they are stopped.
A signal to this process goes to all commands at once.
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
from os import environ
from types import FrameType
from typing import IO

from thinwire.launch.shared.exit_codes import ended, signal_group

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_SECONDS = 0.05


@contextmanager
def gathered_signals() -> Iterator[list[signal.Signals]]:
    """Collect signals instead of ending at once, so that no host stays half made or half removed.

    SIGHUP counts only if no signal came before: the kernel and the shell both send it when a terminal closes, perhaps
    after Ctrl-C, and nobody meant to hurry. If it is ignored, as after `nohup`, it stays so.
    """
    came: list[signal.Signals] = []

    def note(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP or not came:
            came.append(signal.Signals(number))

    wanted = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in wanted}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class HostCommand:
    """One started command. Its output goes to the output of this process, with a label before each line.

    If `hushed`, its output after a signal is dropped: Python programs print tracebacks after a signal.
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
            start_new_session=True,  # only this process gets Ctrl-C, and passes it on
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        self._relays = [
            threading.Thread(target=self._relay, args=(source, sink), daemon=True)
            for source, sink in ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        ]
        for relay in self._relays:
            relay.start()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every process of the command's process group."""
        self._signalled = True
        signal_group(self.process, number)

    def finish(self) -> None:
        """Wait until the command has ended and all its output is written."""
        self.process.wait()
        for relay in self._relays:
            relay.join()

    def _relay(self, source: IO[str], sink: IO[str]) -> None:
        # if nobody reads our output, close the pipe: then the command notices
        with source, suppress(BrokenPipeError):
            for line in source:
                if self._hushed and self._signalled:
                    continue
                sink.write(f"{self.label} | {line.rstrip()}\n")
                sink.flush()


@dataclass(frozen=True)
class Outcome:
    """How the commands ended."""

    status: int
    """Exit status of the first that failed, or 128 + the number of the signal that came."""
    told: str
    """The failure or the signal in words; empty without one."""


def supervise(members: Sequence[HostCommand], came: Sequence[signal.Signals], grace: float) -> Outcome:
    """Wait until all members have ended, or until the grace time is over. The caller stops members that still run.

    After a failure, the others get `grace` seconds, then SIGTERM, then `grace` seconds more. A signal in `came` goes to
    all members at once, and they get `grace` seconds. A second signal ends the wait.
    """
    outcome, interrupted = Outcome(0, ""), False
    # (seconds after the one before, signal to send); None ends the wait. After the one before: this process may have no
    # turn for longer than the grace time, and the members must have theirs all the same
    orders: list[tuple[float, signal.Signals | None]] = []
    before = 0.0
    while any(member.process.poll() is None for member in members):
        now = time.monotonic()
        # 1. a second signal ends the wait, whatever else happened
        if len(came) > 1:
            return _interrupted(came[0])
        # 2. a first signal replaces the orders of a failure; failures after it are its consequence
        if came and not interrupted:
            interrupted, outcome = True, _interrupted(came[0])
            orders, before = [(0.0, came[0]), (grace, None)], now
        elif outcome.status == 0 and (found := _failure(members)):
            outcome = found
            orders, before = [(grace, signal.SIGTERM), (grace, None)], now
        # 3. orders that are due now, new ones too
        while orders and before + orders[0][0] <= now:
            before, (_, order) = now, orders.pop(0)
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


def _failure(members: Sequence[HostCommand]) -> Outcome | None:
    """The first member that failed, with the status that a shell would give."""
    for member in members:
        if code := member.process.poll():
            return Outcome(128 - code if code < 0 else code, f"{member.label} failed first: it {ended(code)}")
    return None
