"""How a stage computes, beside the other parts of a recipe: what does not fit together."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire import compress
from thinwire.models.options import ModelOptions
from thinwire.pipeline.options.pipeline import PipelineOptions
from thinwire.pipeline.options.replicas import ReplicaOptions
from thinwire.pipeline.options.training import OptimizerOptions, TrainingOptions


def misfits(
    model: ModelOptions,
    training: TrainingOptions,
    pipeline: PipelineOptions,
    optimizer: OptimizerOptions,
    replicas: ReplicaOptions,
    gradients: Sequence[compress.Method] = (),
) -> list[str]:
    """A sentence for each way in which a stage cannot compute as these options say.

    `gradients` are the methods of gradients at the boundaries.
    """
    return [
        *_of_recompute(training, pipeline),
        *_of_fp16(training, optimizer, replicas, gradients),
        *_of_narrow_weights(model, training, optimizer, replicas),
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


def _of_fp16(
    training: TrainingOptions,
    optimizer: OptimizerOptions,
    replicas: ReplicaOptions,
    gradients: Sequence[compress.Method],
) -> list[str]:
    """The scale of fp16 changes between steps, and its gradients are not always finite: nothing may remember them."""
    if training.precision != "fp16":
        return []
    remembering = {str(method): method.codec for method in gradients if method.feedback is not None}
    mistakes = [
        f"the codec of gradients must not remember for training.precision fp16, whose gradients overflow now and then, "
        f"got {method}; take {codec}, or training.precision bf16"
        for method, codec in remembering.items()
    ]
    if optimizer.name == "quantized-adam":
        mistakes.append(
            "optimizer.name must be adamw or sgd for training.precision fp16, got quantized-adam, whose momentum would "
            "keep a gradient that overflowed; training.precision bf16 needs no scale"
        )
    if replicas.count > 1:
        mistakes.append(
            f"replicas.count must be 1 for training.precision fp16, whose gradients overflow now and then, got "
            f"{replicas.count}; training.precision bf16 goes with replicas"
        )
    return mistakes


def _of_narrow_weights(
    model: ModelOptions, training: TrainingOptions, optimizer: OptimizerOptions, replicas: ReplicaOptions
) -> list[str]:
    """Weights in bfloat16 go with the arithmetic of fp32 (then all is bfloat16) and of bf16."""
    if model.dtype == "fp32":
        return []
    beside = {
        "training.precision fp16": training.precision == "fp16",
        "optimizer.name quantized-adam": optimizer.name == "quantized-adam",
        f"replicas.count {replicas.count}": replicas.count > 1,
    }
    return [f"model.dtype must be fp32 for {other}, got {model.dtype}" for other, there in beside.items() if there]
