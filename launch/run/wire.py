"""The wire of a process as its recipe wants it, and what all processes must agree on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.compress import SlotCounts
from thinwire.launch.run.fields import WITHOUT_EFFECT, is_among, values_of
from thinwire.launch.run.recipe import Recipe
from thinwire.models.data.samples import Data
from thinwire.models.layers import Blueprint
from thinwire.pipeline.frames import CHANNELS
from thinwire.pipeline.options.overrides import codec_in_words
from thinwire.pipeline.replicas.membership.server import TORCH
from thinwire.pipeline.wire.boundary import Observer
from thinwire.pipeline.wire.wire import Wire

_OWN = (
    "name",
    "description",
    "output",
    "wait_for_space",
    "logging",
    "compression.",  # compared by both ends of each boundary
    "wire.",
    "checkpoint.",
    "training.device",  # stages on GPUs and on CPUs understand each other
    "data.outline",  # only processes without the data need one
    "clients.outlines",  # paths on each host; the digest of the samples stands for their content
)
"""Fields in which stages may differ, or which they compare elsewhere."""
_OWN_OF_HOSTS = (*WITHOUT_EFFECT, "replicas.number", "training.device", "training.compile", "training.epochs")
"""Fields in which replicas on several hosts may differ."""
_FOLLOW = ("training.steps", "model.tied")
"""Fields that may follow from the samples and the model, which the server does not read."""
_FRAMES = ("wire.checksum", "wire.nonfinite")
"""Fields that change no number of a run, but decide what the frames between replicas hold."""
_SHOWN = 60
"""Characters of a value that are shown."""


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
        replace(compression.before_choice(), store_folder=_store_folder(recipe, replica)),
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
    automatic = {"automatic": recipe.compression.automatic}
    # keys as text, as others read them
    agreement: dict[str, Any] = json.loads(json.dumps({**fields, **automatic, **digest}))
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


def agreed_by_hosts(recipe: Recipe) -> dict[str, str]:
    """What replicas on several hosts must have the same, as text: fields of the recipe, and the release of thinwire.

    A long value ends with its digest.
    """
    own, values = (*_OWN_OF_HOSTS, *_FOLLOW), values_of(asdict(recipe))
    shown = {
        name: text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... {sha256(text.encode()).hexdigest()[:8]}"
        for name, text in zip(values, map(json.dumps, values.values()), strict=True)
        if name in _FRAMES or not is_among(name, own)
    }
    return {**shown, "the release of thinwire": version("thinwire")}


def agreed_with_data(recipe: Recipe, data: Data, model: Blueprint) -> dict[str, str]:
    """The same, with what only a replica knows: fields that follow from its data, digests, the release of torch."""
    values = values_of(asdict(recipe))
    known = {name: str(values[name]) for name in _FOLLOW}
    samples = {"the samples of training": data.training.digest}
    if data.held_out is not None:
        samples["the held-out samples"] = data.held_out.digest
    return {**agreed_by_hosts(recipe), **known, **samples, **_of_model(model), TORCH: version("torch")}


def _of_model(model: Blueprint) -> dict[str, str]:
    """What tells the folder of a pretrained model from another one; nothing where there is none."""
    digest = "" if model.checkpoint is None else model.checkpoint.digest()
    return {"the pretrained model": digest} if digest else {}
