"""What replicas on several hosts must agree on: the fields of their recipes, their samples, their software."""

from __future__ import annotations

import json
from dataclasses import asdict
from hashlib import sha256
from importlib.metadata import version

from thinwire.launch.run.fields import WITHOUT_EFFECT, is_among, values_of
from thinwire.launch.run.recipe import Recipe
from thinwire.pipeline.replicas.membership.server import TORCH

_OWN = (*WITHOUT_EFFECT, "replicas.number", "training.device", "training.compile", "training.epochs")
"""Fields in which replicas may differ."""
_FOLLOW = ("training.steps", "model.tied")
"""Fields that may follow from the samples and the model, which the server does not read."""
_FRAMES = ("wire.checksum", "wire.nonfinite")
"""Fields that change no number of a run, but decide what the frames between replicas hold."""
_SHOWN = 60
"""Characters of a value that are shown."""


def agreed(recipe: Recipe) -> dict[str, str]:
    """What must be the same for all replicas, as text: fields of the recipe, and the release of thinwire.

    A long value ends with its digest.
    """
    values = values_of(asdict(recipe)).items()
    fields = {name: _text(value) for name, value in values if name in _FRAMES or not is_among(name, (*_OWN, *_FOLLOW))}
    return {**fields, "the release of thinwire": version("thinwire")}


def agreed_with_data(recipe: Recipe, samples: str) -> dict[str, str]:
    """The same, with what only a replica knows: fields that follow from its data, their digest, release of torch."""
    values = values_of(asdict(recipe))
    known = {name: str(values[name]) for name in _FOLLOW}
    return {**agreed(recipe), **known, "the samples of training": samples, TORCH: version("torch")}


def _text(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... {sha256(text.encode()).hexdigest()[:8]}"
