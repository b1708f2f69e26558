"""The wire of a process as its recipe wants it, and what all processes must agree on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.compress import SlotCounts
from thinwire.launch.run.fields import is_among, values_of
from thinwire.launch.run.recipe import Recipe
from thinwire.models.data.samples import Data
from thinwire.models.layers import Blueprint
from thinwire.pipeline.frames import CHANNELS
from thinwire.pipeline.options.overrides import codec_in_words
from thinwire.pipeline.wire.boundary import Observer
from thinwire.pipeline.wire.wire import Wire

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


def make_wire(
    recipe: Recipe,
    data: Data,
    replica: int | None,
    agreement: Mapping[str, Any],
    observer: Observer | None,
    group: dist.ProcessGroup | None,
) -> Wire:
    """The wire of one process; collective over its pipeline.

    `replica` is that of this process; None without replicas, or in a simulation of all. `agreement` is what `agreed`
    returns.
    """
    compression = recipe.replicas.codecs(replica, recipe.compression)
    positions = recipe.batch_size if replica is None else recipe.batch_sizes[replica]
    # the rows that fill up the last pass of an evaluation have slots, too
    scored = math.ceil(len(data.held_out or ()) / recipe.pipeline.pass_size) * recipe.pipeline.pass_size
    return Wire(
        replace(compression, store_folder=_store_folder(recipe, replica)),
        recipe.wire,
        seed=recipe.training.seed,
        agreement=agreement,
        slots=SlotCounts(positions=positions, samples=len(data.training), evaluation_samples=scored),
        observer=observer,
        group=group,
    )


def _store_folder(recipe: Recipe, replica: int | None) -> str:
    """The folder for the stores of this run, or of this replica. No other run or replica shares it."""
    chosen = recipe.compression.store_folder
    folder = Path(chosen, recipe.name) if chosen else recipe.folder / "stores"
    return str(folder if replica is None else folder / f"replica-{replica}")


def agreed(recipe: Recipe, data: Data, model: Blueprint) -> dict[str, Any]:
    """The values that all stages must agree on beside codecs and shapes, by dotted name."""
    fields = {name: value for name, value in values_of(asdict(recipe)).items() if not is_among(name, _OWN)}
    fields |= {"checkpoint.every": recipe.checkpoint.every, "compression.shared": recipe.compression.shared}
    if recipe.clients.outlines:
        del fields["data.name"]
    anew, held_out = "read the same data, or write the outline anew", data.held_out
    digest = {
        f"digest of the samples; {anew}": data.training.digest,
        f"digest of the held-out samples; {anew}": None if held_out is None else held_out.digest,
        **{f"digest of {name}; copy it from one host to all": value for name, value in _of_model(model).items()},
    }
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
        f"compression.{channel} of boundary {boundary}": codec_in_words(
            common, recipe.replicas.overrides, boundary, channel
        )
        for boundary in range(recipe.num_boundaries)
        for channel in CHANNELS
    }
    return {**codecs, "compression.warmup": common.warmup, "compression.warmup_fill": common.warmup_fill}


def _of_model(model: Blueprint) -> dict[str, str]:
    """What tells the folder of a pretrained model from another one; nothing where there is none."""
    digest = "" if model.checkpoint is None else model.checkpoint.digest()
    return {"the pretrained model": digest} if digest else {}
