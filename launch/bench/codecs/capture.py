"""What really crosses the boundaries of a recipe: the tensors that its stages send, from a short run in one process.

Codecs are judged on these, because activations and gradients are not Gaussian.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor

from thinwire.compress import Microbatch
from thinwire.launch.run.assembly import assemble, prepare, simulated_placement
from thinwire.launch.run.recipe import Recipe
from thinwire.pipeline.boundary import Observer
from thinwire.pipeline.channel import Channel
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.frames import ChannelName
from thinwire.pipeline.options import CompressionOptions


@dataclass(frozen=True, order=True)
class Passage:
    """Which tensor of which message."""

    boundary: int
    channel: ChannelName
    microbatch: int
    tensor: int
    """The place in the tuple that crosses the boundary."""


def capture(wanted: Recipe, steps: int) -> dict[Passage, Tensor]:
    """Train a recipe for `steps` without compression; the tensors that crossed boundaries in the last pass.

    Only tensors that a codec would be given, those that need gradients, in the order of their boundaries. This process
    must not have a default process group. Raises ModelError for a recipe whose parts do not fit, OptionsError for one
    without boundaries, NonFiniteError when training diverges.
    """
    if not wanted.num_boundaries:
        raise OptionsError(f"nothing crosses in {wanted.name}, which has one stage; take a recipe with more")
    prepared = prepare(
        replace(
            wanted,
            compression=CompressionOptions(activations="none", gradients="none"),
            training=replace(wanted.training, steps=steps),
        )
    )
    passages: dict[Passage, Tensor] = {}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        where = simulated_placement(prepared.recipe)
        trainer = assemble(prepared, where, rank=0, observer=recording(passages)).trainer
        trainer.train(lambda _: None)
        for stage in trainer.stages:
            stage.close()
    finally:
        dist.destroy_process_group()
    return dict(sorted(passages.items()))


def recording(passages: dict[Passage, Tensor]) -> Observer:
    """An observer that copies what crosses, of each passage the last."""

    def record(channel: Channel, microbatch: Microbatch, tensors: Sequence[Tensor | None]) -> None:
        for index, (tensor, example) in enumerate(zip(tensors, channel.examples, strict=True)):
            if tensor is not None and example.requires_grad:
                passage = Passage(channel.boundary, channel.name, microbatch.index, index)
                passages[passage] = tensor.detach().clone()

    return record
