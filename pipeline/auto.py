"""`auto`: after compute and links are measured, each channel gets the mildest codec that hides its wire.

The wire is hidden if a frame takes less time than a part of the compute. For activations this is a part of the time
that the slowest process needs for the forwards of one micro-batch, in all its stages together; for gradients, of the
time for the backwards. The schedule decides the part (`ScheduleSpec.overlap`): 1 if frames wait only for frames of
their kind, or if a forward and a backward are in flight for the wire; less if compute soon waits for a round trip. If
several boundaries lie between the same two processes, their channels share a link in equal parts.

Of a candidate with code="entropy" nobody knows the bytes before it has coded something. So the sender of each channel
keeps a message while compute is measured, and codes it with every such candidate.

Speed is not all: a run with held-out samples scores its choice on one batch of them. While that costs too much, the
strongest codec of its activations is left out, and it chooses again among milder ones.

All processes gather the same numbers, so all make the same choice. No choice is sent.

Replicas make one choice for all of them: for each channel the strongest codec that one of them needs. At each exchange
all wait for the slowest, so a faster replica has as much time for its frames.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from thinwire.compress import Microbatch, parse
from thinwire.compress.measured import some_rows
from thinwire.errors.words import were
from thinwire.pipeline.devices.device import copy_to_host
from thinwire.pipeline.frames import CHANNELS, ChannelName
from thinwire.pipeline.measuring.probe import LinkSpeed, probe
from thinwire.pipeline.options import CompressionOptions, PipelineOptions
from thinwire.pipeline.processes import collectives
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.processes.transport import reaching
from thinwire.pipeline.schedules import SCHEDULES, Overlap
from thinwire.pipeline.stages.compressed_stage import CompressedStage
from thinwire.pipeline.wire.channel import Channel, frame_length
from thinwire.pipeline.wire.passes import phase_of

ChannelKey = tuple[int, ChannelName]
"""Boundary and channel."""
Pair = tuple[int, int]
"""A link: the process that sends and the one that receives."""

_TASKS: Mapping[ChannelName, tuple[str, ...]] = {
    "activations": ("forward", "loss"),
    "gradients": ("backward", "weights"),
}
"""The compute that hides each channel's frames."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements behind a choice."""

    compute: Mapping[ChannelName, Sequence[float]]
    """Seconds of compute for a micro-batch, by stage: forwards for activations, backwards for gradients."""
    links: Mapping[Pair, LinkSpeed]
    """The measured speed of the links between neighbouring processes of a pipeline, by their places in it."""
    microbatches: int = 1
    """Micro-batches of a step."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The codec chosen for a channel, and why."""

    boundary: int
    channel: ChannelName
    codec: str
    nbytes: int
    """Bytes of a frame."""
    goodput: float | None
    """Bytes a second of this channel's part of the link; None where both ends are in one process."""
    sharing: int
    """Channels that use the link at the same time."""
    wire: float
    """Seconds that a frame takes on the wire."""
    hidden: float
    """Seconds that it may take before compute must wait."""
    share: float
    """`hidden` as a share of the slowest process's forwards of a micro-batch (for a gradient: backwards)."""
    milder: str | None
    """The next milder candidate, which takes too long; None if there is none."""
    milder_wire: float | None
    """Seconds that a frame of the milder candidate takes."""
    replica: int | None = None
    """The replica whose numbers these are; None without replicas."""

    @property
    def hides(self) -> bool:
        """Whether the wire hides; if not, this is the strongest candidate."""
        return self.wire <= self.hidden

    def __str__(self) -> str:
        """The choice and its reason, in a line."""
        low, high = self.boundary, self.boundary + 1
        route = f"{low} -> {high}" if self.channel == "activations" else f"{high} -> {low}"
        whose = "" if self.replica is None else f" of replica {self.replica}"
        head = f"auto: boundary {route} {self.channel}{whose}: {self.codec}, {self.nbytes:,} bytes a frame"
        if self.goodput is None:
            return f"{head}: the mildest, because both ends are in one process"
        shared = f" each for {self.sharing} channels" if self.sharing > 1 else ""
        rate = self.goodput * 8e-6
        head += f": {_ms(self.wire)} at {rate:{',.0f' if rate >= 1e3 else '.4g'}} Mbit/s{shared}"
        part = "" if self.share == 1 else f"{self.share:.0%} of "
        behind = f"{part}{_ms(self.hidden / self.share)} of {_TASKS[self.channel][0]}"
        if not self.hides:
            return f"{head}, longer than {behind}: even the strongest candidate slows the step"
        too_long = "" if self.milder_wire is None else f"; {self.milder} takes {_ms(self.milder_wire)}"
        return f"{head}, hidden by {behind}{too_long}"


Frames = Mapping[ChannelKey, Mapping[str, int]]
"""For each channel to choose for, the bytes of a frame of each candidate, the mildest first."""


def choose(frames: Frames, measured: Measured, process_of: Sequence[int], overlap: Overlap) -> list[Choice]:
    """The choice for each channel."""
    users = Counter(_phase(key, process_of, overlap) for key in _channels(process_of))
    hidden = {channel: overlap.share * _slowest(seconds, process_of) for channel, seconds in measured.compute.items()}
    choices = []
    for key, sizes in frames.items():
        link = measured.links.get(_link(key, process_of))
        sharing = users[_phase(key, process_of, overlap)] if link else 1
        goodput = link.goodput / sharing if link else None
        latency = link.latency if link and not overlap.phased else 0.0
        wires = {codec: latency + (size / goodput if goodput else 0.0) for codec, size in sizes.items()}
        allowed, names = hidden[key[1]], list(sizes)
        place = next((index for index, name in enumerate(names) if wires[name] <= allowed), len(names) - 1)
        codec, milder = names[place], names[place - 1] if place else None
        choices.append(
            Choice(
                boundary=key[0],
                channel=key[1],
                codec=codec,
                nbytes=sizes[codec],
                goodput=goodput,
                sharing=sharing,
                wire=wires[codec],
                hidden=allowed,
                share=overlap.share,
                milder=milder,
                milder_wire=None if milder is None else wires[milder],
            )
        )
    return choices


def choose_for_all(
    replicas: Sequence[tuple[Frames, Measured]], process_of: Sequence[int], overlap: Overlap
) -> list[Choice]:
    """The choice for each channel of all replicas, from the frames and measurements of each.

    It is the strongest codec that a replica needs, if its compute took as long as that of the slowest one.
    """
    steps = [
        measured.microbatches * sum(_slowest(seconds, process_of) for seconds in measured.compute.values())
        for _, measured in replicas
    ]
    by_replica = [
        choose(frames, _slowed(measured, max(steps) / step), process_of, overlap)
        for (frames, measured), step in zip(replicas, steps, strict=True)
    ]
    if len(replicas) == 1:
        return by_replica[0]
    choices = []
    for of_channel in zip(*by_replica, strict=True):
        order = list(replicas[0][0][of_channel[0].boundary, of_channel[0].channel])
        needs = [(order.index(choice.codec), choice.wire, -replica) for replica, choice in enumerate(of_channel)]
        replica = -max(needs)[-1]
        choices.append(replace(of_channel[replica], replica=replica))
    return choices


def _slowed(measured: Measured, factor: float) -> Measured:
    compute = {channel: [factor * each for each in seconds] for channel, seconds in measured.compute.items()}
    return replace(measured, compute=compute)


class Automatic:
    """Chooses the codecs of automatic channels. Every process has one, and calls it at the same steps.

    Args:
        stages: this process's stages, connected, with the codecs that are used before the choice.
        where: where all stages live.
        compression: which channels are automatic, and the candidates.
        pipeline: the schedule, and how many micro-batches a pass has.
        passes: those of the replicas in this process in a step.

    Raises:
        CodecError: a candidate cannot carry what crosses a boundary.
    """

    def __init__(
        self,
        stages: Sequence[CompressedStage],
        where: Placement,
        compression: CompressionOptions,
        pipeline: PipelineOptions,
        passes: int = 1,
    ) -> None:
        self._stages, self._where, self._compression = list(stages), where, compression
        self._process_of = [where.place_of(stage) for stage in range(where.num_stages)]
        self._wire = stages[0].wire
        self._overlap = SCHEDULES[pipeline.schedule].overlap
        self._microbatches = pipeline.num_microbatches * passes
        self._senders = {
            (end.outgoing.channel.boundary, end.outgoing.channel.name): end.outgoing
            for stage in self._stages
            for end in stage.ends
            if compression.is_automatic(end.outgoing.channel.boundary, end.outgoing.channel.name)
        }
        for stage in self._stages:
            stage.keeps_codecs = False
        self._sent: dict[ChannelKey, list[Tensor | None]] = {}
        self._frame_bytes()  # a candidate that cannot carry the tensors is refused before the first step
        if any(parse(codec).codec.varies for codec in compression.candidates):
            for sender in self._senders.values():
                sender.observers.append(self._keep)
        self._laps: list[dict[tuple[int, ChannelName], float]] = []
        self.begin_step()

    def begin_step(self) -> None:
        """Begin to count compute."""
        self._before = self._computed()

    def end_step(self) -> None:
        """Count the compute of the step that ended."""
        self._laps.append({key: now - self._before[key] for key, now in self._computed().items()})

    @property
    def steps_measured(self) -> int:
        """Steps whose compute was counted."""
        return len(self._laps)

    def state_dict(self) -> list[list[list[Any]]]:
        """The steps measured so far, as JSON values."""
        return [[[*key, seconds] for key, seconds in lap.items()] for lap in self._laps]

    def load_state_dict(self, laps: Sequence[Sequence[Sequence[Any]]]) -> None:
        """Go on from the result of `state_dict` in the process of the same stages."""
        self._laps = [{(stage, channel): seconds for stage, channel, seconds in lap} for lap in laps]
        self.begin_step()

    def switch(self, costly: Callable[[], bool] | None = None) -> list[Choice]:
        """Measure the links, choose codecs, and use them from the next step on; collective, between two steps.

        Args:
            costly: whether a held-out loss shows that the codecs now in use cost too much; collective. None: nothing
                is scored.

        Raises:
            PeerError: another process is gone or silent.
        """
        # gather before probing: a process that still sends frames of its step would slow the links
        compute = {channel: collectives.gather_numbers(self._where, self._medians(channel)) for channel in CHANNELS}
        frames = self._gather_frames()
        measured = Measured(compute=compute, links=self._probe(), microbatches=self._microbatches)
        told = collectives.everyone_across(self._where, _as_json(frames, measured))
        replicas = [_from_json(each) for each in told]
        while True:
            choices = choose_for_all(replicas, self._process_of, self._overlap)
            self.use(choices)
            chosen = [choice.codec for choice in choices if choice.channel == "activations"]
            strongest = max(map(self._compression.candidates.index, chosen), default=0)
            if costly is None or strongest == 0 or not costly():
                return choices
            milder = self._compression.candidates[:strongest]
            replicas = [(_among(milder, frames), measured) for frames, measured in replicas]

    def use(self, choices: Sequence[Choice]) -> None:
        """Use the chosen codecs from the next step on; collective, between two steps."""
        for sender in self._senders.values():
            sender.observers = [observer for observer in sender.observers if observer != self._keep]
        self._sent.clear()
        chosen = {(choice.boundary, choice.channel): choice.codec for choice in choices}
        # the wire first: it announces the new codecs of all stages here, and `reconnect` waits for those of neighbours
        self._wire.switch(self._compression.chosen(chosen))
        for stage in self._stages:
            stage.reconnect()
            stage.keeps_codecs = True

    def _computed(self) -> dict[tuple[int, ChannelName], float]:
        return {
            (stage.stage_index, channel): sum(stage.meter.computing.get(task, 0.0) for task in tasks)
            for stage in self._stages
            for channel, tasks in _TASKS.items()
        }

    def _medians(self, channel: ChannelName) -> dict[int, float]:
        """Seconds of a micro-batch in each stage of this process: the median of steps, because the first is slow."""
        return {
            stage.stage_index: statistics.median(lap[stage.stage_index, channel] for lap in self._laps)
            / self._microbatches
            for stage in self._stages
        }

    def _probe(self) -> dict[Pair, LinkSpeed]:
        """Measure all links between processes of neighbouring stages, one after the other, with no other traffic."""
        found = {}
        for source, target in dict.fromkeys(_link(key, self._process_of) for key in _channels(self._process_of)):
            if source != target:
                first = self._where.replica * self._where.num_processes
                ends = f"{first + source} to {first + target}"
                with reaching(f"process {dist.get_rank()} was measuring the link from process {ends}"):
                    found[source, target] = probe(source, target, self._wire.group)
        return found

    def _gather_frames(self) -> dict[ChannelKey, dict[str, int]]:
        """Bytes of a frame of each candidate for every automatic channel, as the stage that sends it has them."""
        mine = [[*key, nbytes] for key, nbytes in self._frame_bytes().items()]
        what = f"{were([stage.stage_index for stage in self._stages])} waiting for the sizes of all frames"
        told = collectives.all_gather_json(mine, what, self._where.pipeline)
        sizes = {tuple(key): nbytes for of_process in told for *key, nbytes in of_process}
        automatic = [key for key in _channels(self._process_of) if self._compression.is_automatic(*key)]
        return {key: {codec: sizes[*key, codec] for codec in self._compression.candidates} for key in automatic}

    def _frame_bytes(self) -> dict[tuple[int, ChannelName, str], int]:
        """Bytes of a frame of each candidate, for the automatic channels that this process sends.

        Those of the message that was kept, or where there is none, of Gaussian data.
        """
        return {
            (*key, codec): frame_length(sender.channel.examples, parse(codec), parse(codec), self._sent.get(key))
            for key, sender in self._senders.items()
            for codec in self._compression.candidates
        }

    def _keep(self, channel: Channel, microbatch: Microbatch, tensors: Sequence[Tensor | None]) -> None:
        """Keep the first message of a pass of training, in place of the one of the pass before."""
        if microbatch.index == 0 and phase_of(microbatch.kind) == "train":
            self._sent[channel.boundary, channel.name] = [
                None if tensor is None else copy_to_host(some_rows(tensor)) for tensor in tensors
            ]


def _among(candidates: Sequence[str], frames: Frames) -> Frames:
    """The same frames, of these candidates alone for activations."""
    return {
        key: {codec: size for codec, size in sizes.items() if key[1] != "activations" or codec in candidates}
        for key, sizes in frames.items()
    }


def _as_json(frames: Frames, measured: Measured) -> dict[str, Any]:
    """The frames and measurements of one replica as JSON values."""
    return {
        "frames": [[*key, dict(sizes)] for key, sizes in frames.items()],
        "compute": {channel: list(seconds) for channel, seconds in measured.compute.items()},
        "links": [[*pair, asdict(speed)] for pair, speed in measured.links.items()],
        "microbatches": measured.microbatches,
    }


def _from_json(told: Mapping[str, Any]) -> tuple[Frames, Measured]:
    """What `_as_json` made values of."""
    links = {(source, target): LinkSpeed(**speed) for source, target, speed in told["links"]}
    measured = Measured(compute=told["compute"], links=links, microbatches=told["microbatches"])
    return {(boundary, channel): sizes for boundary, channel, sizes in told["frames"]}, measured


def _channels(process_of: Sequence[int]) -> list[ChannelKey]:
    """Every channel of the pipeline."""
    return [(boundary, channel) for boundary in range(len(process_of) - 1) for channel in CHANNELS]


def _link(key: ChannelKey, process_of: Sequence[int]) -> Pair:
    """The processes that a channel goes from and to."""
    boundary, channel = key
    low, high = process_of[boundary], process_of[boundary + 1]
    return (low, high) if channel == "activations" else (high, low)


def _phase(key: ChannelKey, process_of: Sequence[int], overlap: Overlap) -> tuple[Pair, ChannelName | None]:
    """What channels compete for: a link, where the schedule is phased only with their like."""
    return _link(key, process_of), key[1] if overlap.phased else None


def _slowest(seconds: Sequence[float], process_of: Sequence[int]) -> float:
    """Seconds of the slowest process, all its stages together."""
    sums: defaultdict[int, float] = defaultdict(float)
    for process, spent in zip(process_of, seconds, strict=True):
        sums[process] += spent
    return max(sums.values())


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
