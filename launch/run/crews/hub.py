"""The meeting place of replicas that may be lost: a process of the launcher, which passes frames on.

    python -m thinwire.launch.run.crews.hub DESCRIPTOR REPLICAS PROCESSES TIMEOUT

It listens nowhere, so nobody else can reach it. The launcher makes a pair of connected sockets for each stage process,
and hands one end of each over through the socket with that descriptor. It needs the standard library only, and starts
at once.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from thinwire.launch.run import parent
from thinwire.pipeline.replicas.membership.meeting import Meeting
from thinwire.pipeline.replicas.membership.messages import packed, read

MOST_SOCKETS = 250
"""Sockets that one message of the launcher may carry; Linux allows 253."""
_POLL = 0.05


class Hub:
    """The connections of all stage processes.

    Args:
        control: to the launcher.
        replicas: their number.
        processes: those of each replica.
        timeout: seconds to wait for the others at an exchange.
    """

    def __init__(self, control: socket.socket, replicas: int, processes: int, timeout: float) -> None:
        self._control = control
        self._meeting = Meeting(replicas, processes, timeout, self._answer, _tell)
        self._launcher_is_gone = False
        self._writers: dict[tuple[int, int], asyncio.StreamWriter] = {}
        self._tasks: dict[tuple[int, int], asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Pass messages on until the launcher is gone."""
        self._control.setblocking(False)
        asyncio.get_running_loop().add_reader(self._control, self._heed)
        while not self._launcher_is_gone:
            for task in self._tasks.values():
                if task.done():
                    task.result()  # a mistake of ours ends this process, so that nobody waits for its answer
            self._meeting.settle()
            await asyncio.sleep(_POLL)

    def _heed(self) -> None:
        """Do what the launcher says."""
        text, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, MOST_SOCKETS)
        if not text:
            self._launcher_is_gone = True
            return
        words = json.loads(text)
        if "comes" in words:
            self._close(words["comes"])
            self._meeting.comes(words["comes"])
            for process, descriptor in enumerate(descriptors):
                key = words["comes"], process
                self._tasks[key] = asyncio.create_task(self._hear(key, socket.socket(fileno=descriptor)))
        elif "loses" in words:
            self._close(words["loses"])
            self._meeting.loses(words["loses"], for_good=words["for_good"])
        else:
            self._meeting.stop()

    async def _hear(self, key: tuple[int, int], connection: socket.socket) -> None:
        reader, self._writers[key] = await asyncio.open_connection(sock=connection)
        with suppress(EOFError, OSError):  # the launcher says who is lost
            while True:
                self._meeting.said(*key, await read(reader))

    def _answer(self, replica: int, process: int, words: Mapping[str, Any], blobs: Sequence[bytes]) -> None:
        for piece in packed(words, blobs):
            self._writers[replica, process].write(piece)

    def _close(self, replica: int) -> None:
        """Hear the processes of a replica no more."""
        for key in [key for key in self._tasks if key[0] == replica]:
            self._tasks.pop(key).cancel()
            if (writer := self._writers.pop(key, None)) is not None:
                writer.close()


def _tell(text: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        print(text, file=sys.stderr, flush=True)


def main(descriptor: str, replicas: str, processes: str, timeout: str) -> None:
    """Be the meeting place until the launcher is gone."""
    parent.end_with_parent()
    control = socket.socket(fileno=int(descriptor))
    asyncio.run(Hub(control, int(replicas), int(processes), float(timeout)).serve())


if __name__ == "__main__":
    main(*sys.argv[1:])
