"""TensorBoard's curves, written without its own writer.

That one writes on a thread of its own: when the disk is full, the thread dies and its points are lost. Here one event
has all points of a step, which takes fewer bytes too.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import text as text_summary

from thinwire.launch.run.logs.files import LogFile

_VERSION = "brain.Event:2"
_PREFIX = "events.out.tfevents."


class Curves:
    """Files of events for TensorBoard, which shows all files of a folder as one run.

    Args:
        folder: where they are.
        limit: bytes that a file may have before the next one begins; 0 for no limit.
        first: the first step of what follows. TensorBoard forgets the points from this step on that it has seen.
    """

    def __init__(self, folder: Path, limit: int, first: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{_PREFIX}{_moment(folder):010d}.{socket.gethostname()}.{os.getpid()}"
        names = (folder / f"{name}.{index:05d}" for index in count())
        self.file = LogFile(next(names), limit, lambda full: next(names), lambda: _record(file_version=_VERSION))
        if first:
            self.file.add(_record(step=first, session_log=SessionLog(status=SessionLog.START)))

    def text(self, name: str, markdown: str) -> None:
        """Add a text."""
        self.file.add(_record(summary=text_summary(name, markdown)))

    def add(self, step: int, points: Mapping[str, float]) -> None:
        """Add a point to each of several curves."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in points.items()]
        self.file.add(_record(step=step, summary=Summary(value=values)))


def _moment(folder: Path) -> int:
    """The time in the name of the next file, later than all others: TensorBoard reads in this order.

    The clock may have been set back since.
    """
    names = (path.name.removeprefix(_PREFIX).split(".")[0] for path in folder.glob(f"{_PREFIX}*"))
    return max([int(time.time()), *(int(moment) + 1 for moment in names if moment.isdecimal())])


def _record(**fields: object) -> bytes:
    """An event as TensorBoard reads it: its length, its bytes, and checksums of both."""
    buffer = io.BytesIO()
    RecordWriter(buffer).write(Event(wall_time=time.time(), **fields).SerializeToString())
    return buffer.getvalue()
