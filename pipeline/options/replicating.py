"""Replicas, beside the other parts of a recipe: what does not fit together."""

from __future__ import annotations

from thinwire.errors.words import listed
from thinwire.pipeline.options.compression import CompressionOptions
from thinwire.pipeline.options.overrides import ReplicaCodecs, check_overrides
from thinwire.pipeline.options.pipeline import WireOptions
from thinwire.pipeline.options.replicas import ReplicaOptions
from thinwire.pipeline.options.training import OptimizerOptions


def misfits(
    replicas: ReplicaOptions,
    compression: CompressionOptions,
    wire: WireOptions,
    optimizer: OptimizerOptions,
    num_boundaries: int,
) -> list[str]:
    """A sentence for each way in which replicas cannot train as these options say."""
    if replicas.count == 1:
        return []
    return [
        *_of_auto(replicas, compression),
        *_of_transport(replicas, wire),
        *_of_keys(replicas, wire),
        *_of_optimizer(replicas, optimizer),
        *_of_overrides(replicas, compression, num_boundaries),
        *_of_samples(compression.possible_by_sample if replicas.shuffle == "across" else []),
    ]


def _of_auto(replicas: ReplicaOptions, compression: CompressionOptions) -> list[str]:
    if not compression.automatic:
        return []
    own = [f"replica {index}" for index, each in replicas.overrides.items() if each.compression != ReplicaCodecs()]
    rules = [
        (not replicas.elastic, "replicas.membership must be fixed for auto, because all replicas choose together"),
        (
            not own,
            f"replicas.overrides must name no codecs beside auto, which chooses for all, got codecs of {listed(own)}",
        ),
    ]
    told = ", ".join(compression.automatic)
    return [f"{sentence}; or name codecs in place of auto for {told}" for holds, sentence in rules if not holds]


def _of_transport(replicas: ReplicaOptions, wire: WireOptions) -> list[str]:
    if wire.transport != "zmq" or not replicas.elastic:
        return []
    return [f"replicas.membership elastic needs wire.transport gloo, got {wire.transport}"]


def _of_keys(replicas: ReplicaOptions, wire: WireOptions) -> list[str]:
    if replicas.meeting is None or wire.keys is not None:
        return []
    return ["wire.keys must name a file of keys for replicas.meeting; make one with thinwire keys FILE"]


def _of_optimizer(replicas: ReplicaOptions, optimizer: OptimizerOptions) -> list[str]:
    if optimizer.name != "quantized-adam" or replicas.sync.every == 1:
        return []
    return [
        f"replicas.sync.every must be 1 for quantized-adam, because each step exchanges its momentum, got "
        f"{replicas.sync.every}; adamw steps alone"
    ]


def _of_overrides(replicas: ReplicaOptions, compression: CompressionOptions, num_boundaries: int) -> list[str]:
    """Mistakes of replicas with codecs of their own."""
    mistakes = check_overrides(replicas.overrides, compression, replicas.count, num_boundaries)
    if mistakes or replicas.shuffle == "within":
        return mistakes
    return [
        mistake
        for replica in replicas.overrides
        for name in replicas.codecs(replica, compression).by_sample
        if name not in compression.by_sample
        for mistake in _of_samples([f"replicas.overrides.{replica}.{name}"])
    ]


def _of_samples(fields: list[str]) -> list[str]:
    """A sentence if these fields keep a buffer for each sample, where another replica may have it next."""
    if not fields:
        return []
    return [
        f"replicas.shuffle must be within for feedback with a buffer for each sample, because the buffers stay with "
        f"one replica; got across beside {', '.join(fields)}"
    ]
