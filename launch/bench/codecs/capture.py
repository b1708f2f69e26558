"""The tensors that cross the boundaries of a recipe, captured in a short run in one process.

A codec is measured on these too, because activations and gradients are not Gaussian.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from thinwire.compress import Microbatch
from thinwire.launch.plan.places import simulated_placement
from thinwire.launch.plan.prepare import prepare
from thinwire.launch.recipe.recipe import Recipe
from thinwire.launch.run.assembly import assemble
from thinwire.launch.shared.interfaces import alone
from thinwire.pipeline.frames import ChannelName
from thinwire.pipeline.options import CompressionOptions
from thinwire.pipeline.wire.boundary import Observer
from thinwire.pipeline.wire.channel import Channel, is_coded


@dataclass(frozen=True, order=True)
class Passage:
    """The identity of a captured tensor: which message, and which tensor in it."""

    boundary: int
    channel: ChannelName
    microbatch: int
    tensor: int
    """The index in the tuple that crosses the boundary."""


def snapshot(wanted: Recipe, steps: int) -> dict[Passage, Tensor]:
    """Train a recipe with boundaries without compression for `steps` steps; the tensors that crossed in the last one.

    They are those of the step's last pass, in the order of their boundaries, and only those that need gradients,
    because codecs get no others. This process must not have a default process group.

    Raises:
        ModelError: the parts of the recipe do not fit together.
        NonFiniteError: the training diverged.
    """
    prepared = prepare(
        replace(
            wanted,
            compression=CompressionOptions(activations="none", gradients="none"),
            training=replace(wanted.training, steps=steps),
        )
    )
    passages: dict[Passage, Tensor] = {}
    with alone():
        where = simulated_placement(prepared.recipe)
        assembly = assemble(prepared, where, rank=0, observer=recording(passages))
        assembly.trainer.train(lambda record: None)
        assembly.close()
    return dict(sorted(passages.items()))


def recording(passages: dict[Passage, Tensor]) -> Observer:
    """An observer that copies each tensor into `passages`. A later tensor of the same passage replaces the earlier."""

    def record(channel: Channel, microbatch: Microbatch, tensors: Sequence[Tensor | None]) -> None:
        for index, (tensor, example) in enumerate(zip(tensors, channel.examples, strict=True)):
            if tensor is not None and is_coded(example):
                passage = Passage(channel.boundary, channel.name, microbatch.index, index)
                passages[passage] = tensor.detach().clone()

    return record
