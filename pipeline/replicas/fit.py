"""Whether a model can have replicas: their weights are equal, in float32."""

from __future__ import annotations

import torch

from thinwire.models.errors import ModelError
from thinwire.models.layers import Blueprint, build_layers
from thinwire.pipeline.options import ReplicaOptions


def check_fit(blueprint: Blueprint, replicas: ReplicaOptions) -> None:
    """Raise ModelError, with a sentence, if a model cannot have these replicas."""
    if replicas.count == 1:
        return
    weights = (named for layer in build_layers(blueprint) for named in layer.full_parameters().items())
    trained = [(name, each.dtype) for name, each in weights if each.requires_grad]
    if others := [f"{name} ({dtype})" for name, dtype in trained if dtype != torch.float32]:
        raise ModelError(
            f"replicas must have weights in float32, because these travel as such, got {others[0]}; lower "
            f"replicas.count to 1, or make the weights float32"
        )
