"""What all processes of a run must agree on."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from thinwire.launch.recipe.fields import is_among, values_of
from thinwire.launch.recipe.recipe import Recipe
from thinwire.models.data.samples import Data
from thinwire.models.layers import Blueprint
from thinwire.pipeline.frames import CHANNELS

_OWN = (
    "name",
    "description",
    "output",
    "logging",
    "compression.",  # compared by both ends of each boundary
    "wire.",
    "checkpoint.",
    "training.device",  # stages on GPUs and on CPUs understand each other
    "data.outline",  # only processes without the data need one
    "clients.outlines",  # paths on each host; the digest of the samples stands for their content
)
"""Fields in which stages may differ, or which they compare elsewhere."""


def agreed(recipe: Recipe, data: Data, model: Blueprint) -> dict[str, Any]:
    """The values that all stages must agree on beside codecs and shapes, by dotted name."""
    fields = {name: value for name, value in values_of(asdict(recipe)).items() if not is_among(name, _OWN)}
    fields |= {"checkpoint.every": recipe.checkpoint.every, "compression.shared": recipe.compression.shared}
    if recipe.clients.outlines:
        del fields["data.name"]
    anew = "read the same data, or write the outline anew"
    digest = {
        f"digest of the samples; {anew}": data.training.digest,
        f"digest of the held-out samples; {anew}": data.held_out_digest,
    }
    # what tells the folder of a pretrained model from another one
    if model.checkpoint is not None and (of_model := model.checkpoint.digest()):
        digest["digest of the pretrained model; copy it from one host to all"] = of_model
    # keys as text, as others read them
    agreement: dict[str, Any] = json.loads(json.dumps({**fields, **digest}))
    return agreement


def agreed_by_replicas(recipe: Recipe) -> dict[str, Any]:
    """The values that all replicas must agree on beside those of all stages, by name; none without replicas.

    Two ends of a boundary compare its codecs. Replicas have no boundary between them, so they compare those of all
    boundaries, as each of them takes all to have them.
    """
    if recipe.replicas.count == 1:
        return {}
    common = recipe.compression
    codecs = {
        f"compression.{channel} of boundary {boundary}": str(common.method(boundary, channel))
        for boundary in range(recipe.num_boundaries)
        for channel in CHANNELS
    }
    return {**codecs, "compression.warmup": common.warmup, "compression.warmup_fill": common.warmup_fill}
