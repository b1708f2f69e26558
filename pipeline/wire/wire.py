"""The connection of one process's stages to their neighbours: options, a process group, and links in memory.

Torch's schedules exchange messages with tag 0 at start and at each switch between training and evaluation. So a Wire
has a process group of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.compress import SlotCounts
from thinwire.pipeline.errors import OptionsError, PipelineError
from thinwire.pipeline.frames import CHANNELS, VERSION, ChannelName
from thinwire.pipeline.measuring.clocks import NeighbourClocks
from thinwire.pipeline.options import CompressionOptions, WireOptions
from thinwire.pipeline.options.compression import split_pair
from thinwire.pipeline.processes import posts
from thinwire.pipeline.processes.backends import group_arguments
from thinwire.pipeline.processes.transport import reaching
from thinwire.pipeline.wire.boundary import BoundaryEnd, Observer, Receiver, Sender
from thinwire.pipeline.wire.channel import Channel
from thinwire.pipeline.wire.handshake import Handshake
from thinwire.pipeline.wire.maker import EndMaker, Holder, require_rows


@dataclass(frozen=True)
class BoundaryShape:
    """A boundary: its index, and the tuple of meta tensors that crosses it forward."""

    index: int
    examples: tuple[Tensor, ...]
    trains: bool = True
    """Whether anything before the boundary trains."""
    version: int = 0
    """How often its tensors have changed."""

    @property
    def gradients(self) -> tuple[Tensor, ...]:
        """The tuple that crosses the boundary backward: a gradient for each tensor that needs one."""
        return tuple(example for example in self.examples if example.requires_grad) if self.trains else ()


class WireStage(Protocol):
    """A stage of a Wire."""

    stage_index: int

    def announce(self) -> bool:
        """Publish its configuration; False if it does not know its shapes yet."""


class Wire:
    """Connects the stages of this process to their neighbours, in this process or another.

    Args:
        compression: the codecs, or None for the defaults. If a codec keeps buffers on disk, store_folder must be a
            folder that no other run uses.
        options: time-out, checksum, what to do with NaN.
        seed: seed of all random numbers that codecs draw.
        agreement: more JSON values, by name, that must be the same at both ends of every boundary.
        group: the process group of the pipeline; None is the default group. Creating a Wire is collective over it.
        slots: the number of slots for feedback; None means the positions of one pass, and no sample ids.
        observer: called with every tuple that the stages send, before it is encoded.

    Raises:
        OptionsError: a store on disk has no folder, or the group is `fake`, that of torch's tests.

    Attributes:
        maker: makes the ends of channels; it knows their stores, and the links from GPU to GPU.
        handshake: what the stages have announced.
        members: the stages of this process, in the order in which they joined.
        timeout: of a wait for another stage.
        clocks: the clocks of neighbours. After they are read, waiting for the wire and waiting for a neighbour are
            counted apart (`Section`).
    """

    def __init__(
        self,
        compression: CompressionOptions | None = None,
        options: WireOptions | None = None,
        *,
        seed: int = 0,
        agreement: Mapping[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
        slots: SlotCounts | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.compression = _usable(compression or CompressionOptions())
        self.options = options or WireOptions()
        self.seed = seed
        self.slots = slots
        self._observer = observer
        self.clocks = NeighbourClocks()
        self._agreement = dict(agreement or {})
        self.timeout = timedelta(seconds=self.options.timeout)
        self.members: list[WireStage] = []
        self._silent: list[WireStage] = []
        self._pipeline, self._in_use = group or dist.group.WORLD, False
        ranks = dist.get_process_group_ranks(self._pipeline)
        if dist.get_backend(self._pipeline) == "fake" and len(ranks) > 1:
            raise OptionsError(
                f"a Wire must have a process group whose processes answer, got fake, with one of {len(ranks)}; take "
                f"gloo, with world_size 1 and all stages in this process to try a schedule alone"
            )
        posts.limit_answers(dist.distributed_c10d._get_default_store(), self.timeout)
        with reaching(f"process {dist.get_rank()} was connecting to the others of its pipeline"):
            created = dist.new_group(
                ranks,
                timeout=self.timeout,
                use_local_synchronization=True,
                **group_arguments(self.options, len(ranks), beside=True),
            )
        assert isinstance(created, dist.ProcessGroup), "this process is no member of its own pipeline"
        self.group = created
        self.maker = EndMaker(created, self.options, self.clocks, self.compression.store_folder, slots, observer)
        self.handshake = Handshake(created, self.timeout)

    def beside(self) -> Wire:
        """Another wire between the same stages, which compresses nothing until it is given codecs without feedback."""
        return Wire(
            CompressionOptions(activations="none", gradients="none"),
            self.options,
            seed=self.seed,
            agreement=self._agreement,
            group=self._pipeline,
            slots=self.slots,
            observer=self._observer,
        )

    def require_group(self, group: dist.ProcessGroup | None) -> None:
        """Raise OptionsError unless a stage's process group is that of this wire."""
        theirs, mine = map(dist.get_process_group_ranks, (group or dist.group.WORLD, self._pipeline))
        if theirs != mine:
            raise OptionsError(
                f"a stage and its Wire must have the same process group, got ranks {theirs} for the stage and {mine} "
                f"for the Wire; create it with Wire(..., group=group)"
            )

    def join(self, stage: WireStage) -> int:
        """Take in a stage of this process; its number among those with the same index."""
        self.members.append(stage)
        self._silent.append(stage)
        return sum(member.stage_index == stage.stage_index for member in self.members[:-1])

    def forget(self, stage: WireStage, boundary: int, number: int) -> None:
        """Drop what connects a stage over a boundary whose tensors change; the stage announces itself again."""
        if stage not in self._silent:
            self._silent.append(stage)
        self.maker.forget(boundary, number)

    def awaits(self, stage_index: int, group: dist.ProcessGroup | None) -> bool:
        """Whether a stage may still join: nothing is connected, and there is no stage with its index."""
        known = {member.stage_index for member in self.members}
        return self._pipeline is (group or dist.group.WORLD) and not self._in_use and stage_index not in known

    def announce_all(self, here: Collection[int]) -> None:
        """Let all stages of this process publish their configuration; this never waits. `here` are their indices.

        Raises PipelineError if one of them has another Wire.
        """
        self._in_use = True
        joined = {member.stage_index for member in self.members}
        if away := sorted(set(here) - joined):
            raise PipelineError(
                f"all stages of a process must share one Wire, but stage {away[0]} has another one than stages "
                f"{sorted(joined)} of its process; create one Wire, and give it to each CompressedStage"
            )
        self._silent = [member for member in self._silent if not member.announce()]

    def announce(self, stage: str, boundaries: Sequence[BoundaryShape], rows: int, trains: bool) -> None:
        """Publish the configuration of a stage for its neighbours, and for all whether anything in it trains."""
        for shape in boundaries:
            self.handshake.announce(stage, shape.index, shape.version, self._configuration(shape, rows))
        self.handshake.tell_training(stage, trains)

    def compare(self, stage: str, neighbour: str, shape: BoundaryShape, rows: int) -> None:
        """Compare the configuration of a boundary with the neighbour's.

        It warns if only the torch version differs. Raises MismatchError with all differences, and PeerError when a
        neighbour does not answer in time.
        """
        self.handshake.compare(stage, neighbour, shape.index, shape.version, self._configuration(shape, rows))

    def switch(self, compression: CompressionOptions) -> None:
        """Use other codecs from the next step on, and let stages say anew whether they train.

        Every process must call this between two steps, when no frame is under way, and then call `reconnect` on each
        of its stages.
        """
        self.compression = _usable(compression)
        # restart first: it names a new round, so that no neighbour compares with an answer of the round before
        self.handshake.restart()
        self._silent = list(self.members)

    def attach(self, shape: BoundaryShape, holder: Holder, before: BoundaryEnd | None = None) -> BoundaryEnd:
        """A stage's end of a boundary.

        Args:
            shape: the boundary, and the tensors that cross it.
            holder: the stage that holds this end, `shape.index` or `shape.index + 1`.
            before: the end until now. A channel with the same codec stays as it is, with its buffers.
        """
        channels = self.channels(shape)
        for channel in channels.values():
            require_rows(channel, holder)
        existing = {} if before is None else before.by_name
        kept = {name: end for name, end in existing.items() if end.channel.is_like(channels[name])}
        if "activations" not in kept and channels["gradients"].method.codec.reuses_indices:
            kept.pop("gradients", None)  # it has the indices of the activations until now
        for name, end in existing.items():
            if name not in kept:
                end.close()
        # activations first: a `reuse` of the gradients needs the coders of the activations
        fill = self.compression.warmup_fill
        forth = kept.get("activations") or self.maker.make(
            channels["activations"], holder, [None] * len(shape.examples), fill
        )
        coded = [coder for coder, x in zip(forth.coders, shape.examples, strict=True) if x.requires_grad]
        activations = coded if shape.trains else []
        back = kept.get("gradients") or self.maker.make(channels["gradients"], holder, activations, fill)
        outgoing, incoming = (forth, back) if holder.stage == shape.index else (back, forth)
        assert isinstance(outgoing, Sender) and isinstance(incoming, Receiver)
        return BoundaryEnd(outgoing, incoming)

    @property
    def notes(self) -> list[str]:
        """What carries the frames of each pair of processes, and which codecs of this process go uncoded, in words."""
        wanted = {self.compression.method(*channel): channel for channel in self.maker.gpus.groups}
        known = {method: self.maker.known(method, *channel) for method, channel in wanted.items()}
        return [
            *self.maker.gpus.notes,
            *(
                f"{method} goes over NCCL as {other}, because frames have a length known in advance there: the same "
                f"losses and weights, and more bytes"
                for method, other in known.items()
                if other != method
            ),
        ]

    def channels(self, shape: BoundaryShape) -> dict[ChannelName, Channel]:
        """Both channels of a boundary, the same for both of its stages."""
        return {
            name: Channel(
                boundary=shape.index,
                name=name,
                examples=shape.examples if name == "activations" else shape.gradients,
                method=self.maker.known(self.compression.method(shape.index, name), shape.index, name),
                seed=self.seed,
            )
            for name in CHANNELS
        }

    def _configuration(self, shape: BoundaryShape, rows: int) -> dict[str, Any]:
        channels = self.channels(shape).values()
        configurations = [channel.configuration() for channel in channels]
        by_row = any(channel.method.feedback is not None for channel in channels)
        return {
            **{name: value for configuration in configurations for name, value in configuration.items()},
            "frame version": VERSION,
            "checksum": self.options.checksum,
            "warmup": self.compression.warmup,
            "warmup_fill": self.compression.warmup_fill,
            **({"samples in a micro-batch": rows} if by_row else {}),
            "torch": torch.__version__,
            **self._agreement,
        }


@contextmanager
def compressed(codecs: str) -> Iterator[None]:
    """Give stages that are built inside without a wire these codecs: `activations/gradients`, or one for both.

    Raises OptionsError if a codec cannot be used.
    """
    activations, gradients = split_pair(str(codecs))  # None, or a pair, is refused by its text
    try:
        compression = CompressionOptions(activations=activations, gradients=gradients)
    except OptionsError as error:
        mistakes = [mistake.replace("compression.", "") for mistake in error.mistakes]
        raise OptionsError([f"compressed({codecs!r}): {mistake}" for mistake in mistakes]) from None
    token = _CODECS.set(compression)
    try:
        yield
    finally:
        _CODECS.reset(token)


def wire_of(group: dist.ProcessGroup | None, stage_index: int) -> Wire:
    """The wire of a stage that is given none: that of the other stages of its pipeline in this process, or a new one.

    A pipeline is what is built before its first step, in one process group, with the same codecs, each stage once.
    """
    compression = _CODECS.get() or CompressionOptions()
    for wire in _SHARED:
        if wire.awaits(stage_index, group) and wire.compression == compression:
            return wire
    _SHARED[made := Wire(compression, group=group)] = None
    return made


_CODECS: ContextVar[CompressionOptions | None] = ContextVar("codecs", default=None)
_SHARED: WeakKeyDictionary[Wire, None] = WeakKeyDictionary()
"""In the order in which they were made, so that all processes choose alike."""


def _usable(compression: CompressionOptions) -> CompressionOptions:
    """The same options; OptionsError if a Wire cannot use them."""
    if compression.on_disk and not compression.store_folder:
        raise OptionsError(
            f"compression.store_folder must name a folder for stores on disk, got none; {compression.on_disk[0]} "
            f'has store="disk": give each run a folder of its own'
        )
    return compression
