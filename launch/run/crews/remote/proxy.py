"""The way of a replica to a meeting place on another host: a process of its launcher, which passes messages on.

    python -m thinwire.launch.run.crews.remote.proxy DESCRIPTOR      with its ProxySettings as JSON on standard input

It listens nowhere; it calls the meeting place, and calls again if nothing is heard of it. It ends with a sentence for
the launcher if the meeting place sends it away, or is not heard for too long.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from thinwire.errors import ThinwireError
from thinwire.launch.run import parent
from thinwire.launch.run.crews.hub import tell
from thinwire.launch.run.crews.pairs import Pairs
from thinwire.launch.run.crews.remote.settings import ProxySettings
from thinwire.launch.run.crews.remote.stream import (
    ACK,
    HELLO,
    LAUNCHER,
    PIECE,
    PIECE_BYTES,
    REFUSAL,
    UNKNOWN,
    VERSION,
    WELCOME,
    MessageStream,
    pack,
    pack_words,
    unpack,
)
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.interfaces import found
from thinwire.pipeline.replicas.membership.messages import Message
from thinwire.pipeline.zeromq.connections import Patience, bounded
from thinwire.pipeline.zeromq.keys import Keys

_EVERY = 0.25
"""Seconds from one heartbeat to the next."""
_FAREWELL = 5.0
"""Seconds that it waits at its end for the meeting place to take one more piece."""
_SHORT = 1 << 20
"""Bytes that are on their way in a moment."""


@dataclass(frozen=True)
class Ending:
    """Why a proxy ends before its launcher does."""

    text: str
    lasting: bool
    """Whether the launcher must not start its replica again."""


class Proxy:
    """The way to the meeting place; to the launcher and its processes, it is the meeting itself.

    Args:
        settings: where it leads.
        answer: sends a message to a stage process.
    """

    def __init__(
        self, settings: ProxySettings, answer: Callable[[int, int, Mapping[str, Any], Sequence[bytes]], None]
    ) -> None:
        self._settings, self._answer = settings, answer
        self._keys = Keys.read(Path(settings.keys))
        self._session, self._server = secrets.token_hex(16), None
        self._stream = MessageStream()
        self._context = zmq.asyncio.Context()
        self._heard = time.monotonic()
        self._welcomed = False  # a welcome is the last that was heard
        self._told: str | None = None
        self._refused: str | None = None  # why the meeting place lets this replica wait

    def comes(self, replica: int) -> None:
        """Say that the processes of the replica start."""
        self._stream.write(LAUNCHER, {"kind": "comes", "replica": replica})

    def loses(self, replica: int, *, for_good: bool) -> None:
        """Say that the replica has ended, and whether it comes again."""
        self._stream.write(LAUNCHER, {"kind": "loses", "replica": replica, "for_good": for_good})

    def stop(self) -> None:
        """Have the replica stop after the next exchange."""
        self._stream.write(LAUNCHER, {"kind": "stop"})

    def said(self, replica: int, process: int, message: Message) -> None:
        """Pass on what a process said."""
        self._stream.write(process, *message)

    def settle(self) -> None:
        """Do nothing: messages leave at once."""

    async def hold(self) -> Ending:
        """Keep a connection with the meeting place for as long as it can be; why there is none any more."""
        hearing = asyncio.create_task(self._hear())
        while True:
            ending = await self._call(hearing)
            if ending is not None:
                return ending
            if time.monotonic() - self._heard > self._settings.timeout:
                return Ending(self._given_up(), lasting=True)
            self._stream.interrupt()
            await asyncio.sleep(_EVERY)

    async def farewell(self) -> None:
        """Wait until the meeting place has all messages, as long as it takes them: the last ones may be all weights."""
        left, deadline = self._stream.left, time.monotonic() + _FAREWELL
        if left * PIECE_BYTES > _SHORT:
            self._tell(
                f"replica {self._settings.replica} has ended, and the meeting place takes the last "
                f"{left * PIECE_BYTES / 2**20:.0f} MiB of it"
            )
        while left and time.monotonic() < deadline:
            await asyncio.sleep(_EVERY / 5)
            if self._stream.left < left:
                left, deadline = self._stream.left, time.monotonic() + _FAREWELL

    def close(self) -> None:
        """Close all connections."""
        self._context.destroy(linger=0)

    async def _call(self, hearing: asyncio.Task[None]) -> Ending | None:
        """One connection, until it ends: with the reason if there is to be no other."""
        link = self._context.socket(zmq.DEALER)
        bounded(link)
        Patience().watch(link)
        self._keys.prove(link)
        try:
            _connect(link, self._settings.address)
            link.send_multipart(self._hello())
            latest = time.monotonic()
            while True:
                if hearing.done():
                    hearing.result()  # a mistake of ours ends this process, so that nobody waits for its answer
                if await link.poll(round(1e3 * _EVERY)):
                    kind, number, data = unpack(await link.recv_multipart())
                    if kind in (UNKNOWN, REFUSAL):
                        return self._sent_away(json.loads(data)) if kind == REFUSAL else None
                    latest = time.monotonic()
                    self._welcomed = kind == WELCOME
                    if not self._welcomed:  # a welcome is short: it comes over a link on which no piece arrives in time
                        self._heard = latest
                    self._take(link, kind, number, data)
                elif time.monotonic() - latest > self._settings.heartbeat:
                    self._tell(
                        f"replica {self._settings.replica} hears nothing of the meeting place at "
                        f"{self._settings.address}, and waits for it up to {self._settings.timeout:g} s"
                    )
                    return None
        finally:
            link.close(linger=0)

    def _hello(self) -> list[bytes]:
        about = {"replica": self._settings.replica, "session": self._session, "server": self._server}
        return pack_words(HELLO, VERSION, **about, expected=self._stream.expected, agreed=self._settings.agreed)

    def _take(self, link: zmq.asyncio.Socket, kind: bytes, number: int, data: bytes) -> None:
        """Take a packet of the meeting place."""
        if kind == WELCOME:
            welcome = json.loads(data)
            noted = f"; {welcome['noted']}" if welcome["noted"] else ""
            self._tell(f"replica {self._settings.replica} is at the meeting place at {self._settings.address}{noted}")
            self._server = welcome["server"]
            self._stream.begin(lambda *packet: _send(link, *packet), number)
            self._refused = None
        elif kind == PIECE:
            self._stream.take(number, data)
        elif kind == ACK:
            self._stream.acknowledge(number)
        # a piece is answered too: over a slow link a long message takes longer than the meeting place waits for a word
        _send(link, ACK, self._stream.expected)

    def _sent_away(self, refusal: Mapping[str, Any]) -> Ending | None:
        if refusal.get("waits"):
            self._refused = refusal["text"]
            self._tell(f"{self._refused}; this one waits until it is gone, and then comes")
            return None
        said = f"the meeting place at {self._settings.address} said: {refusal['text']}"
        return Ending(said, bool(refusal["lasting"]))

    async def _hear(self) -> None:
        """Give the stage processes what the meeting place says to them."""
        while True:
            process, (words, blobs) = await self._stream.read()
            self._answer(self._settings.replica, process, words, blobs)

    def _given_up(self) -> str:
        place, waited = self._settings.address, f"for {self._settings.timeout:g} s (wire.timeout)"
        if self._refused is not None:
            return (
                f"the meeting place at {place} let this replica wait {waited}, because {self._refused}; end the other "
                f"one, or give this host another replicas.number"
            )
        if self._welcomed:
            return (
                f"the meeting place at {place} answered, and nothing else arrived {waited}: the link must carry "
                f"{PIECE_BYTES >> 10} KiB within wire.heartbeat, which is {self._settings.heartbeat:g} s; raise it"
            )
        return (
            f"the meeting place at {place} was not heard {waited}; start it with thinwire meet and the same keys, then "
            f"this replica again"
        )

    def _tell(self, text: str) -> None:
        """Tell the user a sentence, once in a row."""
        if text != self._told:
            self._told = text
            tell(text)


def _connect(link: zmq.asyncio.Socket, address: str) -> None:
    """Begin a connection. OptionsError if this is no address."""
    try:
        there = found(address)
        link.ipv6 = "[" in there
        link.connect(f"tcp://{there}")
    except (OSError, ValueError) as error:
        raise OptionsError(
            f"replicas.meeting must be ADDRESS:PORT, where thinwire meet listens, got {address}: {error}"
        ) from error


def _send(link: zmq.asyncio.Socket, kind: bytes, number: int, data: bytes = b"") -> None:
    """Send at once: the socket has no limit."""
    link.send_multipart(pack(kind, number, data))


async def lead(control: socket.socket, settings: ProxySettings) -> Ending | None:
    """Be the way to the meeting place until the launcher is gone, or there is no way; then why."""
    pairs = Pairs(control)
    proxy = Proxy(settings, pairs.answer)
    holding, serving = asyncio.create_task(proxy.hold()), asyncio.create_task(pairs.serve(proxy))
    try:
        await asyncio.wait({holding, serving}, return_when=asyncio.FIRST_COMPLETED)
        if holding.done():
            ending = _ending_of(holding)
            # before any socket closes: a stage process that loses its own ends, and the launcher must know why by then
            _tell_launcher(control, ending)
            return ending
        serving.result()
        await proxy.farewell()
        return None
    finally:
        for task in (holding, serving):
            task.cancel()
        proxy.close()


def _ending_of(holding: asyncio.Task[Ending]) -> Ending:
    try:
        return holding.result()
    except ThinwireError as error:
        return Ending(str(error), lasting=True)


def _tell_launcher(control: socket.socket, ending: Ending) -> None:
    with suppress(OSError):  # it has just gone too
        control.send(json.dumps(asdict(ending)).encode())


def main(descriptor: str) -> None:
    """Lead, and tell the launcher why if the way ends before it does."""
    parent.end_with_parent()
    control, settings = socket.socket(fileno=int(descriptor)), ProxySettings(**json.load(sys.stdin))
    try:
        asyncio.run(lead(control, settings))
    except ThinwireError as error:
        _tell_launcher(control, Ending(str(error), lasting=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
