"""Whether a model can have replicas: their weights are equal, in float32, and its stages need enough layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.models.errors import ModelError
from thinwire.models.layers import Blueprint, build_layers
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.options import ReplicaOptions
from thinwire.pipeline.replicas.groups import trained_by_layer


def check_fit(blueprint: Blueprint, cuts: Sequence[range], replicas: ReplicaOptions) -> None:
    """Raise ModelError or OptionsError, with a sentence, if a model with these cuts cannot have these replicas."""
    if replicas.count == 1:
        return
    layers = build_layers(blueprint)
    trained = [own for layer in trained_by_layer(layers) for own in layer.items()]
    if others := [f"{name} ({parameter.dtype})" for name, parameter in trained if parameter.dtype != torch.float32]:
        raise ModelError(
            f"replicas must have weights in float32, because these travel as such, got {others[0]}; lower "
            f"replicas.count to 1, or make the weights float32"
        )
    counts = [len(trained_by_layer(layers[cut.start : cut.stop])) for cut in cuts]
    fewest = min(counts)
    if replicas.groups > max(1, fewest):
        raise OptionsError(
            f"replicas.sync.groups must be at most {fewest}, the layers with weights in stage "
            f"{counts.index(fewest)}, because a group has at least one layer; got {replicas.groups}"
        )
