"""The frame: one message over one channel for one micro-batch, and its 64-byte header.

  0        4         6       7         8          12           16     24      32       40      44  48         56  64
  | "TWIR" | version | phase | channel | boundary | microbatch | step | nones | length | crc32 | 0 | departed | 0 | data
    4s       u16       u8      u8        u32        u32          u64    u64     u64      u32         u64

All numbers are little-endian.

- `boundary`, `microbatch`, `step`: of a frame between replicas the stage, the bucket and the sender, and the optimizer
  step (`pipeline/replicas/lane.py`).
- `nones`: bit i is set if tensor i of the tuple is None. Its bytes are sent, but mean nothing.
- `length`: bytes after the header.
- `crc32`: covers the header, with this field as zeros, and all bytes after it; only the header, if payloads are not
  protected. It is never 0.
- `departed`: the time when the sender sealed the frame, in nanoseconds of its own clock. A receiver that has compared
  the two clocks show whether it waited for the neighbour or for the wire.

The header is padded to 64 bytes, and every tensor's payload begins at a multiple of 16, so payloads can be viewed as
any number type.
"""

from __future__ import annotations

import struct
from typing import Literal, NamedTuple, get_args

from isal import isal_zlib

from thinwire.pipeline.errors import WireError

Frame = memoryview
"""The bytes of a frame on the host."""

Phase = Literal["train", "eval-on", "eval-off"]
PHASES: tuple[Phase, ...] = get_args(Phase)
ChannelName = Literal["activations", "gradients", "parts", "sums", "statistics", "shared parts", "shared sums"]
CHANNELS: tuple[ChannelName, ...] = ("activations", "gradients")
"""The channels of a boundary. The others carry gradients of weights, and running statistics, between the
replicas of a stage, or between stages that hold the same weights."""
EXCHANGE: tuple[ChannelName, ...] = ("parts", "sums", "statistics")
"""The channels between replicas: to the owner of a part of the weights, back to all, and statistics to all."""
SHARED: tuple[ChannelName, ChannelName] = ("shared parts", "shared sums")
"""The channels between stages that hold the same weights: to the owner of a part, and back to all."""

MAGIC = b"TWIR"
VERSION = 3
HEADER_BYTES = 64
ALIGNMENT = 16
_ALL_CHANNELS: tuple[ChannelName, ...] = get_args(ChannelName)
_LAYOUT = struct.Struct("<4sHBBIIQQQI4xQ8x")
_CRC, _CRC_AT, _NO_CRC = struct.Struct("<I"), 40, bytes(4)
_DEPARTED, _DEPARTED_AT = struct.Struct("<Q"), 48
_PLANNED = 6
"""The fields that both ends know are the first of a header."""


class Header(NamedTuple):
    """The header of a frame. Both ends know every field except `nones`, `departed` and `crc32` in advance.

    Of a codec whose payloads vary they know only the largest `length`.
    """

    phase: Phase
    channel: ChannelName
    boundary: int
    microbatch: int
    step: int
    length: int
    nones: int = 0
    departed: int = 0
    crc32: int = 0

    def write(self, frame: Frame) -> None:
        """Put the header into the first 64 bytes of a frame."""
        phase, channel = PHASES.index(self.phase), _ALL_CHANNELS.index(self.channel)
        numbers = self.boundary, self.microbatch, self.step, self.nones, self.length, self.crc32, self.departed
        _LAYOUT.pack_into(frame, 0, MAGIC, VERSION, phase, channel, *numbers)

    @classmethod
    def read(cls, frame: Frame) -> Header:
        """Parse the first 64 bytes of a frame; WireError if they are not a header of this version."""
        magic, version, phase, channel, boundary, microbatch, step, nones, length, crc32, departed = (
            _LAYOUT.unpack_from(frame)
        )
        if magic != MAGIC:
            raise WireError(f"a frame must begin with {MAGIC!r}, got {magic!r}: something else writes to this channel")
        if version != VERSION:
            raise WireError(
                f"frames must have version {VERSION}, got version {version}: use the same release in every process"
            )
        if phase >= len(PHASES) or channel >= len(_ALL_CHANNELS):
            raise WireError(f"unknown phase {phase} or channel {channel} in a frame's header: the frame is damaged")
        known = PHASES[phase], _ALL_CHANNELS[channel], boundary, microbatch, step, length
        return cls(*known, nones=nones, departed=departed, crc32=crc32)


def departure(frame: Frame) -> float:
    """When the sender sealed a frame, in seconds of its own clock; nothing is checked."""
    departed: int = _DEPARTED.unpack_from(frame, _DEPARTED_AT)[0]
    return 1e-9 * departed


def seal(header: Header, frame: Frame, *, payload: bool) -> None:
    """Write `header` and its checksum into a frame that holds its payloads already.

    If `payload` is true, the checksum covers the payloads too.
    """
    header.write(frame)
    _CRC.pack_into(frame, _CRC_AT, checksum(frame[: HEADER_BYTES + header.length], payload=payload))


def check(planned: Header, frame: Frame, *, payload: bool, shorter: bool = False) -> Header:
    """The header of `frame` if it is the planned one; WireError listing every differing field otherwise.

    If `shorter` is true, the plan has the largest length, and a smaller one is right too.

    `frame` may be longer than the sent one: a receive buffer holds the largest frame of its channel. Both ends agreed
    whether the checksum covers the payload; the frame cannot change that.
    """
    got = Header.read(frame)
    if shorter and got.length < planned.length:
        planned = planned._replace(length=got.length)
    if got[:_PLANNED] != planned[:_PLANNED]:
        fields = list(zip(Header._fields, got, planned, strict=True))[:_PLANNED]
        wrong = [f"{name} {mine} where {theirs} was planned" for name, mine, theirs in fields if mine != theirs]
        raise WireError("the frame is not the planned one: " + ", ".join(wrong))
    if got.crc32 != checksum(frame[: HEADER_BYTES + got.length], payload=payload):
        raise WireError("the frame does not match its CRC-32: it was damaged or cut short on the way")
    return got


def checksum(frame: Frame, *, payload: bool) -> int:
    """CRC-32 of the header, with its own field as zeros, and of the payloads if `payload` is true; never 0."""
    begin = isal_zlib.crc32(_NO_CRC, isal_zlib.crc32(frame[:_CRC_AT]))
    rest = frame[_CRC_AT + len(_NO_CRC) : None if payload else HEADER_BYTES]
    return isal_zlib.crc32(rest, begin) or 1
