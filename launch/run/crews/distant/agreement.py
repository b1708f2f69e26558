"""What replicas on several hosts must agree on: the fields of their recipes, and their samples."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256

from thinwire.launch.run.fields import WITHOUT_EFFECT, is_among, values_of
from thinwire.launch.run.recipe import Recipe

_OWN = (*WITHOUT_EFFECT, "replicas.number", "training.device", "training.compile", "training.epochs", "training.steps")
"""Fields in which replicas may differ; the number of steps follows from the samples, and is compared as they are."""
_SHOWN = 60
"""Characters of a value that are shown."""


def agreed(recipe: Recipe) -> dict[str, str]:
    """The fields of a recipe that must be the same for all replicas, as text: a long value ends with its digest."""
    fields = values_of(asdict(recipe))
    return {name: _text(value) for name, value in fields.items() if not is_among(name, _OWN)}


def agreed_with_data(recipe: Recipe, samples: str) -> dict[str, str]:
    """The same, with the number of steps and the digest of the samples."""
    return {**agreed(recipe), "training.steps": str(recipe.training.steps), "the samples of training": samples}


def difference(known: Mapping[str, str], told: Mapping[str, str]) -> str | None:
    """The fields that differ, in words; None if all agree. Only fields that both name are compared."""
    differing = [name for name in known if name in told and known[name] != told[name]]
    if not differing:
        return None
    listed = ", ".join(f"{name} ({known[name]} at the meeting place, {told[name]} here)" for name in differing)
    return f"all replicas must have the same recipe and data, and these differ: {listed}"


def _text(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... {sha256(text.encode()).hexdigest()[:8]}"
