"""The sockets between a launcher, its stage processes, and the process beside it that is their way to the meeting.

It listens nowhere, so nobody else can reach it. The launcher makes a pair of connected sockets for each stage process,
and hands one end of each over through the socket of a descriptor that this process inherits.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from thinwire.pipeline.replicas.membership.messages import Message, packed, read

MOST_SOCKETS = 250
"""Sockets that one message of the launcher may carry; Linux allows 253."""
_POLL = 0.05


class Gathering(Protocol):
    """Who hears what is said here: the meeting itself, or the way to one on another host."""

    def comes(self, replica: int) -> None:
        """Note that the processes of a replica start."""

    def loses(self, replica: int, *, for_good: bool) -> None:
        """Note that a replica has ended, and whether it comes again."""

    def stop(self) -> None:
        """Have all replicas of this launcher stop after the next exchange."""

    def said(self, replica: int, process: int, message: Message) -> None:
        """Take what a process said."""

    def settle(self) -> None:
        """Do all that can be done now."""


class Pairs:
    """The connections of a launcher and of its stage processes.

    Args:
        control: to the launcher.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._launcher_is_gone = False
        self._writers: dict[tuple[int, int], asyncio.StreamWriter] = {}
        self._tasks: dict[tuple[int, int], asyncio.Task[None]] = {}

    async def serve(self, gathering: Gathering) -> None:
        """Pass messages on until the launcher is gone."""
        self._gathering = gathering
        self._control.setblocking(False)
        asyncio.get_running_loop().add_reader(self._control, self._heed)
        while not self._launcher_is_gone:
            for task in self._tasks.values():
                if task.done():
                    task.result()  # a mistake of ours ends this process, so that nobody waits for its answer
            gathering.settle()
            await asyncio.sleep(_POLL)

    def answer(self, replica: int, process: int, words: Mapping[str, Any], blobs: Sequence[bytes]) -> None:
        """Send a message to a process; one whose replica is gone gets none."""
        if (writer := self._writers.get((replica, process))) is not None:
            for piece in packed(words, blobs):
                writer.write(piece)

    def _heed(self) -> None:
        """Do what the launcher says."""
        text, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, MOST_SOCKETS)
        if not text:
            self._launcher_is_gone = True
            asyncio.get_running_loop().remove_reader(self._control)
            return
        words = json.loads(text)
        if "comes" in words:
            self._close(words["comes"])
            self._gathering.comes(words["comes"])
            for process, descriptor in enumerate(descriptors):
                key = words["comes"], process
                self._tasks[key] = asyncio.create_task(self._hear(key, socket.socket(fileno=descriptor)))
        elif "loses" in words:
            self._close(words["loses"])
            self._gathering.loses(words["loses"], for_good=words["for_good"])
        else:
            self._gathering.stop()

    async def _hear(self, key: tuple[int, int], connection: socket.socket) -> None:
        reader, self._writers[key] = await asyncio.open_connection(sock=connection)
        with suppress(EOFError, OSError):  # the launcher says who is lost
            while True:
                self._gathering.said(*key, await read(reader))

    def _close(self, replica: int) -> None:
        """Hear the processes of a replica no more."""
        for key in [key for key in self._tasks if key[0] == replica]:
            self._tasks.pop(key).cancel()
            if (writer := self._writers.pop(key, None)) is not None:
                writer.close()
