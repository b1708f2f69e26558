"""Which groups of a recipe do not go together: how a stage computes, replicas, clients, and keys."""

from __future__ import annotations

from thinwire.errors import broken
from thinwire.models.options import ModelOptions
from thinwire.pipeline.options.clients import ClientOptions
from thinwire.pipeline.options.compression import CompressionOptions
from thinwire.pipeline.options.pipeline import PipelineOptions, WireOptions
from thinwire.pipeline.options.replicas import ReplicaOptions
from thinwire.pipeline.options.training import OptimizerOptions, TrainingOptions
from thinwire.pipeline.processes.backends import TRANSPORTS, names_of


def mistakes(
    model: ModelOptions,
    clients: ClientOptions,
    pipeline: PipelineOptions,
    replicas: ReplicaOptions,
    compression: CompressionOptions,
    wire: WireOptions,
    optimizer: OptimizerOptions,
    training: TrainingOptions,
) -> list[str]:
    """A sentence for each way in which these groups do not go together."""
    encrypting = names_of(lambda transport: transport.encrypts)
    rules = (
        (
            clients.count == 1 or replicas.count == 1,
            f"clients that train in turn need one pipeline, and replicas.count is {replicas.count}; lower it to 1, or "
            f"clients.count to 1",
        ),
        (
            wire.keys is None or TRANSPORTS[wire.transport].encrypts,
            f"wire.keys needs wire.transport {encrypting}, because {wire.transport} encrypts nothing, got {wire.keys}; "
            f"set wire.transport to {encrypting}, or drop the keys",
        ),
    )
    return [
        *compression.mistakes_of_boundaries(pipeline.num_stages),
        *_of_replicas(replicas, compression, optimizer),
        *broken(*rules),
        *_of_recompute(training, pipeline),
        *_of_narrow_weights(model, optimizer, replicas),
    ]


def _of_recompute(training: TrainingOptions, pipeline: PipelineOptions) -> list[str]:
    if training.recompute == "none":
        return []
    from thinwire.pipeline.schedules import splits_backward  # it imports torch

    if not splits_backward(pipeline.schedule, pipeline.num_stages, pipeline.num_processes, pipeline.num_microbatches):
        return []
    return [
        f"training.recompute must be none for {pipeline.schedule}, which splits the backward: each weight would "
        f"compute its block again; got {training.recompute}; 1f1b and interleaved-1f1b have whole backwards"
    ]


def _of_narrow_weights(model: ModelOptions, optimizer: OptimizerOptions, replicas: ReplicaOptions) -> list[str]:
    """Weights in bfloat16 go with one pipeline, and with an optimizer whose moments may be bfloat16."""
    if model.dtype == "fp32":
        return []
    beside = {
        "optimizer.name quantized-adam": optimizer.name == "quantized-adam",
        f"replicas.count {replicas.count}": replicas.count > 1,
    }
    return [f"model.dtype must be fp32 for {other}, got {model.dtype}" for other, there in beside.items() if there]


def _of_replicas(replicas: ReplicaOptions, compression: CompressionOptions, optimizer: OptimizerOptions) -> list[str]:
    """A sentence for each way in which replicas cannot train as these options say."""
    if replicas.count == 1:
        return []
    by_sample = compression.by_sample if replicas.shuffle == "across" else []
    return broken(
        (
            optimizer.name != "quantized-adam" or replicas.sync.every == 1,
            f"replicas.sync.every must be 1 for quantized-adam, because each step exchanges its momentum, got "
            f"{replicas.sync.every}; adamw steps alone",
        ),
        (
            not replicas.step_alone or compression.shared.strip() == "none",
            f"compression.shared must be none where replicas step alone, got {compression.shared}; drop it, or lower "
            f"replicas.sync.every from {replicas.sync.every} to 1",
        ),
        (
            not by_sample,  # another replica may have a sample next
            f"replicas.shuffle must be within for feedback with a buffer for each sample, because the buffers stay "
            f"with one replica; got across beside {', '.join(by_sample)}",
        ),
    )
