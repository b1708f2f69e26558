"""The input of a prediction: the compute of a pipeline, and the tensors at its boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from thinwire.compress import CodecError
from thinwire.launch.shared.links import Network
from thinwire.launch.timing.step_time import Frame
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.frames import CHANNELS, ChannelName
from thinwire.pipeline.options import BoundaryOptions, CompressionOptions, split_pair
from thinwire.pipeline.schedules import SCHEDULES, process_of_stages
from thinwire.pipeline.wire.channel import frame_length

Examples = tuple[Tensor, ...]
UNCOMPRESSED = "none"
NO_COMPRESSION = CompressionOptions(activations=UNCOMPRESSED, gradients=UNCOMPRESSED)


@dataclass(frozen=True)
class CodecCost:
    """Seconds of a codec for one frame, at its two ends."""

    encode: float
    decode: float


FREE = CodecCost(0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """An optimizer step of a pipeline: one or several passes alike."""

    name: str
    num_microbatches: int
    microbatch_size: int
    """Samples of a micro-batch."""
    forward: tuple[float, ...]
    """Seconds of one micro-batch forward, for each stage."""
    backward: tuple[float, ...]
    """Seconds of one micro-batch backward, for each stage."""
    boundaries: tuple[Examples, ...]
    """The meta tensors that cross each boundary forward. Those with requires_grad have gradients that come back."""
    costs: Mapping[tuple[ChannelName, str], CodecCost] = field(default_factory=dict)
    """The cost of a codec, by channel and expression; other codecs are free."""

    accumulation: int = 1
    """Passes of a step, one after the other."""
    layers: int | None = None
    """The layers of the model, which cannot have more stages; None if they are not known."""
    steps: int | None = None
    """Optimizer steps of the whole run; None if they are not known."""

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.forward)

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.accumulation * self.num_microbatches * self.microbatch_size

    def cut_for(self, schedule: str) -> Workload:
        """The same work on the same processes, with the number of stages that a schedule needs.

        The compute of a process is divided evenly among its stages. Every boundary carries the tensors of the first.
        """
        per_process = SCHEDULES[schedule].stages_per_process
        if per_process == 1 or self.num_stages == 1:
            return self
        count = per_process * self.num_stages
        where = process_of_stages(schedule, count, self.num_stages)
        forward, backward = (
            tuple(seconds[where[stage]] / per_process for stage in range(count))
            for seconds in (self.forward, self.backward)
        )
        return replace(self, forward=forward, backward=backward, boundaries=self.boundaries[:1] * (count - 1))

    def frames(self, name: ChannelName, compression: CompressionOptions, network: Network) -> list[Frame]:
        """The frames of one direction, a boundary each, as input of the simulation."""
        methods = compression.methods(self.num_stages - 1, name)
        found = {method: self.costs.get((name, str(method)), FREE) for method in set(methods)}
        frames = []
        for index, (examples, method) in enumerate(zip(self.boundaries, methods, strict=True)):
            on_wire = 8 * frame_bytes(examples, compression, index, name) / network.bandwidth
            cost = found[method]
            frames.append(Frame(on_wire, network.latency, 1 - network.duplex, cost.encode, cost.decode))
        return frames


def frame_bytes(examples: Examples, compression: CompressionOptions, boundary: int, channel: ChannelName) -> int:
    """Bytes of one frame, header and padding included, after the first visit of every row."""
    crossing = [example for example in examples if channel == "activations" or example.requires_grad]
    return frame_length(crossing, compression.method(boundary, channel), compression.method(boundary, "activations"))


def codec_pair(text: str) -> CompressionOptions:
    """The codecs of `activations/gradients`, such as `q(4)/q(8)`. One expression is for both.

    Raises:
        OptionsError: an expression is not a codec.
    """
    activations, gradients = split_pair(text)
    try:
        return CompressionOptions(activations=activations, gradients=gradients)
    except OptionsError as error:
        # the name of a field says nothing here: the user wrote --codec
        raise OptionsError([f"--codec {text}: {told.partition(': ')[2]}" for told in error.mistakes]) from error


def as_sent(compression: CompressionOptions, transport: str) -> CompressionOptions:
    """The codecs in the form in which a transport carries them: over NCCL, uncoded.

    Raises:
        OptionsError: a codec has no form of a length known in advance, which NCCL needs.
    """
    if transport != "nccl":
        return compression

    def known(boundary: int | None) -> dict[str, Any]:
        return {channel: str(compression.method(boundary, channel).of_known_length()) for channel in CHANNELS}

    try:
        own = {index: BoundaryOptions(**known(index)) for index in compression.boundaries}
        return replace(compression, **known(None), boundaries=own)
    except CodecError as error:
        raise OptionsError(
            f"wire.transport nccl needs frames whose length is known in advance: {error}; add --wire.transport gloo"
        ) from error


def label(compression: CompressionOptions) -> str:
    """The codecs as `codec_pair` reads them, and the number of boundaries with other codecs."""
    pair = "/".join(dict.fromkeys(str(getattr(compression, channel)) for channel in CHANNELS))
    others = len(compression.boundaries)
    return f"{pair}, others at {others} boundar{'ies' if others > 1 else 'y'}" if others else pair
