"""Frames from GPU to GPU over NCCL: a communicator for each channel, and no look of the host at any frame.

NCCL wants exact lengths, and both ends have them from the plan. It knows no tags: a communicator delivers in the order
of sending, and two channels have no common order, because each stage receives when its own turn has come. A receive is
a kernel that waits on the GPU until data come, so each is enqueued where the schedule wants its frame, and none
ahead. The header is written on the host and copied into the frame. For a checksum the host would need the payloads, so
the GPU sums them, and the sum travels behind them:

    | header, 64 bytes | payloads, zeros up to a multiple of 8 | sum, int64 |

The receiver compares all headers and sums of a pass at its end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.compress import CodecError, Decoder, Microbatch
from thinwire.pipeline.devices.transports import Location, carrying
from thinwire.pipeline.errors import WireError
from thinwire.pipeline.frames import CHANNELS, HEADER_BYTES, ChannelName, Header, check
from thinwire.pipeline.measuring.meters import Meter
from thinwire.pipeline.options import WireOptions
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.processes.transport import Pool, ReceivingEnd, Seal, complete, reaching
from thinwire.pipeline.wire.boundary import FramePlan, Receiver
from thinwire.pipeline.wire.channel import Channel

BACKEND = "nccl"
_SUM_BYTES = 8
PART = 1 << 20
"""Words of a frame that are summed at a time."""


@dataclass(frozen=True)
class GpuLinks:
    """The links of this process from GPU to GPU."""

    groups: Mapping[tuple[int, ChannelName], dist.ProcessGroup] = field(default_factory=dict)
    """The communicator of each channel, by boundary and name."""
    notes: Sequence[str] = ()
    """What carries the frames of each pair of processes, and why, in words."""


def connect(wanted: str, where: Placement, device: torch.device, timeout: timedelta) -> GpuLinks:
    """The links from GPU to GPU of this process; collective over the default group.

    Raises:
        OptionsError: `wanted` is nccl, and cannot be.
    """
    if wanted not in ("auto", "nccl") or dist.get_world_size() == 1:
        return GpuLinks()
    locations = [Location(**told) for told in collectives.everyone(where, vars(Location.of(device)))]
    found = {pair: carrying(wanted, pair, locations) for pair in where.neighbours}
    notes = [
        f"{by} carries what processes {low} and {high} send each other: {why}"
        for (low, high), (by, why) in found.items()
    ]
    return GpuLinks(_communicators(wanted, where, locations, device, timeout), notes)


def _communicators(
    wanted: str, where: Placement, locations: Sequence[Location], device: torch.device, timeout: timedelta
) -> dict[tuple[int, ChannelName], dist.ProcessGroup]:
    """Those of this process, connected.

    Every process makes all of all replicas in one order, because torch counts groups to name them, and so no two
    processes wait for each other.
    """
    mine: dict[tuple[int, ChannelName], dist.ProcessGroup] = {}
    pipelines = range(0, len(locations), where.num_processes)
    for first, boundary, name in product(pipelines, range(where.num_stages - 1), CHANNELS):
        ends = [where.place_of(stage) + first for stage in (boundary, boundary + 1)]
        low, high = sorted(ends)
        if low != high and carrying(wanted, (low, high), locations)[0] == "nccl":
            made = dist.new_group([low, high], timeout=timeout, backend=BACKEND)
            if isinstance(made, dist.ProcessGroup):  # else this process is no member
                sender, receiver = ends if name == "activations" else reversed(ends)
                _connect(made, sender, receiver, device)
                mine[boundary, name] = made
    return mine


def _connect(group: dist.ProcessGroup, sender: int, receiver: int, device: torch.device) -> None:
    """Send one byte. NCCL connects two GPUs at their first message, and its sender waits for the receiver there.

    In the midst of a schedule both could be senders, of frames of two channels, and wait for each other.
    """
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    if dist.get_rank() == sender:
        work = dist.isend(byte, group=group, group_dst=dist.get_group_rank(group, receiver))
    else:
        work = dist.irecv(byte, group=group, group_src=dist.get_group_rank(group, sender))
    assert work is not None, "this process is a member"
    work.wait()


class PayloadSums:
    """Sums of payloads on a GPU. Every changed byte changes the sum, and so do words that change places.

    A sum is that of the payloads' int32 words, each times an odd number of its own, modulo 2^64: word i times 2i + 1.
    So it is the same in any order of adding. Parts of a frame are summed one after another, each with the factors of
    the first part: what is made beside the frame is of the size of a part.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        words = (sealed_bytes(capacity) - HEADER_BYTES) // 4
        self._factors = 2 * torch.arange(min(words, PART), device=device) + 1

    def of(self, frame: Tensor, nbytes: int) -> Tensor:
        """The sum of a frame of `nbytes` with zeros behind, int64 [1]."""
        words = frame[HEADER_BYTES : sealed_bytes(nbytes) - _SUM_BYTES].view(torch.int32)
        total = torch.zeros(1, dtype=torch.int64, device=frame.device)
        for start in range(0, len(words), PART):
            part = words[start : start + PART]
            total += (part * self._factors[: len(part)]).sum()
            if start:  # the factors of this part are those of the first and twice its start
                total += 2 * start * part.sum(dtype=torch.int64)
        return total

    def seal(self, frame: Tensor, nbytes: int) -> None:
        """Put zeros and the sum behind the payloads."""
        stop = sealed_bytes(nbytes)
        frame[nbytes : stop - _SUM_BYTES] = 0
        frame[stop - _SUM_BYTES : stop].view(torch.int64).copy_(self.of(frame, nbytes))

    def compared(self, frame: Tensor, nbytes: int) -> Tensor:
        """Whether a frame has the sum that it should have, bool [1]."""
        stop = sealed_bytes(nbytes)
        return frame[stop - _SUM_BYTES : stop].view(torch.int64) == self.of(frame, nbytes)


def sealed_bytes(nbytes: int) -> int:
    """Bytes of a frame of `nbytes` with the sum behind it."""
    return math.ceil(nbytes / _SUM_BYTES) * _SUM_BYTES + _SUM_BYTES


class GpuSender(Pool):
    """The way of frames to another GPU. A frame is written again only when it has left."""

    def __init__(
        self, capacity: int, device: torch.device, group: dist.ProcessGroup, peer: int, sums: PayloadSums | None
    ) -> None:
        super().__init__(sealed_bytes(capacity), device=device)
        self._group, self._sums, self._pins = group, sums, device.type != "cpu"
        self._peer = dist.get_group_rank(group, peer)
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def take(self) -> Tensor:
        """A frame on the GPU, contents undefined."""
        if self._sent and self._sent[0][0].is_completed():
            self.give(self._sent.popleft()[1])
        return super().take()

    def send(self, buffer: Tensor, nbytes: int, what: str, seal: Seal = complete) -> None:
        """Put header and sum into the frame and enqueue its send, behind the compute that was asked for until now."""
        # torch gives pinned memory out again only when its copy is done, which nothing here waits for
        head = torch.empty(HEADER_BYTES, dtype=torch.uint8, pin_memory=self._pins)
        seal(head, nbytes)
        buffer[:HEADER_BYTES].copy_(head, non_blocking=True)
        if self._sums is not None:
            self._sums.seal(buffer, nbytes)
        with reaching(what):
            work = dist.isend(buffer[: sealed_bytes(nbytes)], group=self._group, group_dst=self._peer)
        assert work is not None, "this process is a member"
        self._sent.append((work, buffer))

    def flush(self) -> None:
        """Have later compute wait on the GPU until everything sent has left."""
        while self._sent:
            work, frame = self._sent.popleft()
            with reaching("sending frames from GPU to GPU"):
                work.wait()
            self.give(frame)


class GpuArrivals(Pool, ReceivingEnd):
    """The receiving end of frames from another GPU: one buffer, because one receive is enqueued at a time.

    It is given back when compute will not read it after what it was asked for until now.
    """

    def __init__(self, capacity: int, device: torch.device, group: dist.ProcessGroup, peer: int) -> None:
        super().__init__(sealed_bytes(capacity), device=device)
        self._group, self._peer, self._nbytes = group, dist.get_group_rank(group, peer), 0

    def expect(self, nbytes: int) -> None:
        """Say how long the next frame is."""
        self._nbytes = sealed_bytes(nbytes)

    def post(self, count: int, what: str) -> None:
        """Nothing: receives are enqueued one by one."""

    def receive(self, what: str) -> Tensor:
        """Enqueue the next receive, and have later compute wait for it on the GPU."""
        frame = self.take()
        with reaching(what):
            work = dist.irecv(frame[: self._nbytes], group=self._group, group_src=self._peer)
            assert work is not None, "this process is a member"
            work.wait()
        return frame


class GpuReceiver(Receiver):
    """The receiving end of a channel whose frames arrive on the GPU."""

    def __init__(
        self,
        channel: Channel,
        decoders: Sequence[Decoder],
        arrivals: GpuArrivals,
        options: WireOptions,
        meter: Meter,
        sums: PayloadSums | None,
    ) -> None:
        super().__init__(channel, decoders, arrivals, options, meter)
        self._arrivals, self._sums = arrivals, sums
        self._heads: list[tuple[str, Header, Tensor]] = []
        self._intact: list[tuple[str, Tensor]] = []

    def receive(self, microbatch: Microbatch, room: Sequence[Tensor] = ()) -> tuple[Tensor | None, ...]:
        """Order a micro-batch's frame and its decoding; nobody waits. `confirm` checks that it was the right one."""
        channel, what = self.channel, self.channel.describe(microbatch)
        with self._meter.section("decode"), torch.no_grad():
            plan: FramePlan = self.plan(microbatch)
            self._arrivals.expect(plan.nbytes)
            frame = self._arrivals.receive(channel.waiting(microbatch))
            planned = channel.header(microbatch, plan.nbytes)
            self._heads.append((what, planned, frame[:HEADER_BYTES].clone()))
            if self._sums is not None:
                self._intact.append((what, self._sums.compared(frame, plan.nbytes)))
            self.count(self._meter.received, microbatch, plan, plan.nbytes)
            try:
                places = self._places(frame, planned, plan)
                tensors = self._decode(frame, places, microbatch, plan, room)
            except (CodecError, WireError) as error:
                raise self._refused(what, error) from error
            self._arrivals.give(frame)
        return tensors

    def confirm(self) -> None:
        """Compare the headers of the pass with the planned ones, and look at the sums; waits for the GPU.

        Raises WireError if a header or a sum is not as it should be.
        """
        heads, self._heads = self._heads, []
        if heads:
            arrived = torch.stack([head for _, _, head in heads]).cpu()
            for (what, planned, _), head in zip(heads, arrived, strict=True):
                try:
                    if check(planned, head.numpy().data, payload=False).nones:
                        raise WireError("a tensor is None, which only gloo can carry; add --wire.transport gloo")
                except WireError as error:
                    raise self._refused(what, error) from error
        sums, self._intact = self._intact, []
        if sums and not all(intact := torch.cat([each for _, each in sums]).tolist()):
            damaged = WireError("the payloads do not match their sum: the frame was damaged on the way")
            raise self._refused(sums[intact.index(False)][0], damaged)
        super().confirm()
