"""A channel: one direction over one boundary, and where the payloads of its tensors lie in a frame.

Everything here is a description that both ends have alike before a byte is sent; boundary.py moves the frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor

from thinwire.compress import Key, Method, Microbatch, parse
from thinwire.compress.codec import size_of
from thinwire.compress.measured import sent_share
from thinwire.pipeline.frames import ALIGNMENT, HEADER_BYTES, ChannelName, Header
from thinwire.pipeline.wire.passes import phase_of

AS_IT_IS = parse("none")
"""The method of what is not compressed, such as tensors that `is_coded` leaves alone."""


def is_coded(example: Tensor) -> bool:
    """Whether a tensor goes through a codec: not if it needs no gradient, has no elements, or `is_sums`."""
    return example.requires_grad and example.numel() > 0 and not is_sums(example)


def is_sums(example: Tensor) -> bool:
    """Whether a tensor is a vector of float64: sums over a micro-batch, as those of routers, short and exact."""
    return example.dtype == torch.float64 and example.dim() == 1


@dataclass(frozen=True)
class Channel:
    """One direction over one boundary.

    `examples` (meta tensors) give shape and dtype of every tensor that crosses; those that `is_coded` names go through
    `method`, the others as they are.
    """

    boundary: int
    name: ChannelName
    examples: tuple[Tensor, ...]
    method: Method
    seed: int

    def __post_init__(self) -> None:
        self.method.check_channel(self.name)

    @cached_property
    def methods(self) -> tuple[Method, ...]:
        """The method of each tensor."""
        return _methods(self.method, self.examples)

    def is_like(self, other: Channel) -> bool:
        """Whether the ends of one channel can be those of the other: tensors and methods are the same."""
        return self.methods == other.methods and self._tensors == other._tensors

    @cached_property
    def source(self) -> int:
        """The stage that sends."""
        return self.boundary if self.name == "activations" else self.boundary + 1

    @cached_property
    def destination(self) -> int:
        """The stage that receives."""
        return self.boundary + 1 if self.name == "activations" else self.boundary

    @cached_property
    def may_leave_out(self) -> bool:
        """Whether a tensor may be None, as the gradient of an activation that the loss does not depend on."""
        return self.name == "gradients"

    @cached_property
    def sender(self) -> str:
        """Who sends, in words."""
        return f"stage {self.source}"

    @cached_property
    def receiver(self) -> str:
        """Who receives, in words."""
        return f"stage {self.destination}"

    def header(self, microbatch: Microbatch, nbytes: int, nones: int = 0, departed: int = 0) -> Header:
        """The header of one micro-batch's frame of `nbytes`."""
        phase, length = phase_of(microbatch.kind), nbytes - HEADER_BYTES
        return Header(phase, self.name, self.boundary, microbatch.index, microbatch.step, length, nones, departed)

    def key(self, microbatch: Microbatch, tensor: int) -> Key:
        """The source of randomness of one tensor of one micro-batch."""
        phase = phase_of(microbatch.kind)
        return Key(self.seed, self.boundary, self.name, phase, microbatch.step, microbatch.index, tensor)

    def configuration(self) -> dict[str, Any]:
        """What both ends must agree on, as JSON values."""
        return {
            f"{self.name} codec": str(self.method),
            f"{self.name} tensors": self._tensors,
            "seed": self.seed,
        }

    @property
    def _tensors(self) -> list[str]:
        return [
            f"{str(example.dtype).removeprefix('torch.')}{list(example.shape)}"
            + (" with gradient" if example.requires_grad else "")
            for example in self.examples
        ]

    def describe(self, microbatch: Microbatch) -> str:
        """A frame of this channel in words, for errors."""
        return (
            f"{self.name} of micro-batch {microbatch.index}, {phase_of(microbatch.kind)} pass {microbatch.step}, "
            f"over boundary {self.boundary}"
        )

    def sending(self, microbatch: Microbatch) -> str:
        """Sending a frame, in words."""
        return f"{self.sender} was sending {self.describe(microbatch)} to {self.receiver}"

    def waiting(self, microbatch: Microbatch) -> str:
        """Waiting for a frame, in words."""
        return f"{self.receiver} was waiting for {self.describe(microbatch)} from {self.sender}"


def _methods(method: Method, examples: Sequence[Tensor]) -> tuple[Method, ...]:
    """The method of each tensor."""
    return tuple(method if is_coded(one) else AS_IT_IS for one in examples)


def place_of(size: int, stop: int) -> slice:
    """The place of a payload: from the next multiple of 16 after `stop`, where the header or the last payload ends."""
    start = -(-stop // ALIGNMENT) * ALIGNMENT
    return slice(start, start + size)


def frame_bytes(sizes: Iterable[int]) -> int:
    """Bytes of a frame with payloads of these sizes, header and padding included."""
    return reduce(lambda stop, size: place_of(size, stop).stop, sizes, HEADER_BYTES)


def frame_length(examples: Sequence[Tensor], method: Method, activations: Method) -> int:
    """Bytes of one frame, header and padding included, once feedback has visited every row.

    Of a codec whose payloads vary, the bytes that Gaussian data take.

    Args:
        examples: the meta tensors that cross; some go as they are.
        method: the method of the others.
        activations: the method of the activations at the same boundary.

    Raises:
        CodecError: `reuse` beside activations that share no indices.
    """
    sizes = []
    for each, example in zip(_methods(method, examples), examples, strict=True):
        codec, shape = each.codec.bound_to(activations.inner), tuple(example.shape)
        coded = torch.float32 if each.feedback else example.dtype
        sizes.append(round(sent_share(codec, shape, coded) * size_of(codec, shape, coded)))
    return frame_bytes(sizes)
