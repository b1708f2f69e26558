"""A call between two machines that `thinwire doctor --peers` was started on: lines of JSON, and a measurement.

Whoever answers bounds what a caller can take: a line has a largest length, each answer its time, and what is sent for a
measurement is counted and dropped.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from itertools import combinations
from typing import Any

MACHINES = 32
"""The most in a list."""
PATIENCE = 5.0
"""Seconds for a connection, and for each answer."""
PINGS = 10
SECONDS = 2.0
"""Of sending to measure goodput. The first half is not counted: TCP finds the speed of the link in it."""
_BETWEEN = SECONDS / 20
"""Between two counts of what has arrived."""
_CHUNK = _LINE = 1 << 16


def refusal(sentence: object) -> OSError:
    """The error of an end that is reached, where a call again would not help; `strerror` says why."""
    return OSError(errno.EPROTO, words(sentence))


class Call:
    """A connection whose messages are lines of JSON. Each method raises OSError where the other end fails."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE)
        self._connection, self._reader = connection, connection.makefile("rb")

    def close(self) -> None:
        """Hang up."""
        self._reader.close()
        self._connection.close()

    def say(self, **message: Any) -> None:
        """Send a message."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def heard(self, patience: float = PATIENCE) -> dict[str, Any]:
        """The next message."""
        self._connection.settimeout(patience)
        text = self._reader.readline(_LINE)
        self._connection.settimeout(PATIENCE)
        if not text:
            raise ConnectionResetError
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise refusal(f"another program listens there, and says {text[:40]!r}; write another port on every machine")
        return message

    def measured(self) -> tuple[float, float]:
        """Seconds of latency one way, and bits a second that arrive at the other end."""
        trips = []
        for _ in range(PINGS):
            begun = time.perf_counter()
            self.say(ping=True)
            self.heard()
            trips.append(time.perf_counter() - begun)
        self.say(flood=True)
        piece = os.urandom(_CHUNK)  # nothing that a VPN could compress
        while not (ready := select.select([self._connection], [self._connection], [], PATIENCE))[0]:
            if not ready[1]:
                raise TimeoutError
            self._connection.send(piece)
        rate = float(self.heard()["rate"])
        # closed so, it drops what still waits in memory, and would delay the next measurement
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return statistics.median(trips) / 2, rate

    def answer_measurement(self) -> None:
        """The other end of `measured`."""
        for _ in range(PINGS):
            self.heard()
            self.say(pong=True)
        self.heard()
        begun = now = time.monotonic()
        due, total, arrived = begun + SECONDS / 2, 0, list[tuple[float, int]]()
        while len(arrived) < 2 or now - begun < SECONDS:
            if not (count := len(self._connection.recv(_CHUNK))):
                return
            now, total = time.monotonic(), total + count
            if now >= due:
                arrived.append((now, total))
                due = now + _BETWEEN
        self.say(rate=rate_of(arrived))
        # a connection that is closed with data unread takes the answer away with it
        while time.monotonic() - now < PATIENCE and self._connection.recv(_CHUNK):
            pass


def rate_of(arrived: Sequence[tuple[float, int]]) -> float:
    """Bits a second, of how many bytes had arrived at some times: the median of the rates between any two of them.

    What waits behind a lost packet, or while this machine is busy, arrives later and at once: a few rates are wrong.
    """
    pairs = combinations(arrived, 2)
    return statistics.median(8 * (more - some) / (late - soon) for (soon, some), (late, more) in pairs)


def words(told: object) -> str:
    """What another machine told, as text that can be printed."""
    return "".join(each for each in str(told)[:600] if each.isprintable())


def why(error: Exception, port: int) -> str:
    """Why a call failed, and what to do."""
    match error:
        case OSError(errno=errno.EPROTO):
            return str(error.strerror)
        case ConnectionRefusedError():
            return (
                f"refused: nothing listens at port {port}, or a firewall rejects it; start the same command there, or "
                "open the port"
            )
        case TimeoutError():
            return (
                f"no answer within {PATIENCE:g} s: a firewall drops what comes to port {port}, the machine is off, or "
                "its VPN is down"
            )
        case OSError(errno=errno.EHOSTUNREACH | errno.ENETUNREACH):
            return (
                f"no route ({error.strerror}): the machine is off, or the two are in no common network; write the "
                "addresses of a VPN that both are in"
            )
        case ConnectionError():
            return (
                f"it hung up: another program listens at port {port}, or this call came from an address that is not in "
                "its list, as behind a router (NAT)"
            )
    return f"the call failed: {error}"
