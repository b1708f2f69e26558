"""What single replicas do differently from the others: fields of a recipe, with their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from thinwire.errors.words import numbered
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.frames import CHANNELS, ChannelName
from thinwire.pipeline.options.compression import BoundaryOptions, CompressionOptions


@dataclass(frozen=True, kw_only=True)
class ReplicaCodecs:
    """Codecs of one replica. A channel that is left out keeps those of the recipe."""

    activations: str | None = None
    """Codec of this replica's activations, at all its boundaries."""
    gradients: str | None = None
    """Codec of this replica's gradients, at all its boundaries."""
    boundaries: dict[int, BoundaryOptions] = field(default_factory=dict)
    """Codecs of single boundaries of this replica, by index."""


@dataclass(frozen=True, kw_only=True)
class ReplicaPipeline:
    """The work of one replica in a step."""

    accumulation: int | None = None
    """Passes of this replica through its pipeline in each optimizer step; null takes pipeline.accumulation."""


@dataclass(frozen=True, kw_only=True)
class ReplicaOverride:
    """What one replica does differently from the others."""

    compression: ReplicaCodecs = field(default_factory=ReplicaCodecs)
    """Codecs of its boundaries: none where it has a fast network, for example."""
    pipeline: ReplicaPipeline = field(default_factory=ReplicaPipeline)
    """Its work in a step: fewer passes, so fewer samples, where it is slow, for example."""


def overridden(common: CompressionOptions, codecs: ReplicaCodecs) -> CompressionOptions:
    """The codecs of a replica. OptionsError if they cannot work."""
    indices = common.boundaries.keys() | codecs.boundaries.keys()
    boundaries = {
        index: BoundaryOptions(
            **{
                channel: _first(
                    getattr(codecs.boundaries.get(index), channel, None),
                    getattr(codecs, channel),
                    getattr(common.boundaries.get(index), channel, None),
                )
                for channel in CHANNELS
            }
        )
        for index in sorted(indices)
    }
    activations, gradients = codecs.activations or common.activations, codecs.gradients or common.gradients
    return replace(common, activations=activations, gradients=gradients, boundaries=boundaries)


def check_overrides(
    overrides: Mapping[int, ReplicaOverride], common: CompressionOptions, replicas: int, boundaries: int
) -> list[str]:
    """A sentence for each override that cannot work beside the other fields of a recipe."""
    mistakes = []
    if unknown := sorted(replica for replica in overrides if not 0 <= replica < replicas):
        mistakes.append(
            f"replicas.overrides must name replicas in 0..{replicas - 1} for replicas.count {replicas}, "
            f"got {', '.join(map(str, unknown))}"
        )
    for replica, override in overrides.items():
        where, passes = f"replicas.overrides.{replica}", override.pipeline.accumulation
        if passes is not None and passes < 1:
            mistakes.append(
                f"{where}.pipeline.accumulation must be at least 1, because each replica takes part in each step, "
                f"got {passes}; for a slow replica, raise pipeline.accumulation of the others"
            )
        if unknown := sorted(index for index in override.compression.boundaries if not 0 <= index < boundaries):
            mistakes.append(
                f"{where}.compression.boundaries must lie in 0..{boundaries - 1}, got {', '.join(map(str, unknown))}"
            )
        if override.compression == ReplicaCodecs():
            continue
        try:
            overridden(common, override.compression)
        except OptionsError as error:
            mistakes += [f"{where}: {mistake}" for mistake in error.mistakes]
    return mistakes


def codec_in_words(
    common: CompressionOptions, overrides: Mapping[int, ReplicaOverride], boundary: int, channel: ChannelName
) -> str:
    """The codec of a channel for tables, with the replicas that have another: `q(4), none in replica 1`."""
    usual = str(common.method(boundary, channel))
    others: dict[str, list[int]] = {}
    for replica, override in sorted(overrides.items()):
        codec = str(overridden(common, override.compression).method(boundary, channel))
        if codec != usual:
            others.setdefault(codec, []).append(replica)
    return ", ".join([usual, *(f"{codec} in {numbered('replica', replicas)}" for codec, replicas in others.items())])


def _first(*values: str | None) -> str | None:
    """The first value that is given."""
    return next((value for value in values if value is not None), None)
