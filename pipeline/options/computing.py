"""How a stage computes, beside the other parts of a recipe: what does not fit together."""

from __future__ import annotations

from thinwire.pipeline.options.pipeline import PipelineOptions
from thinwire.pipeline.options.training import TrainingOptions


def misfits(training: TrainingOptions, pipeline: PipelineOptions) -> list[str]:
    """A sentence for each way in which a stage cannot compute as these options say."""
    return _of_recompute(training, pipeline)


def _of_recompute(training: TrainingOptions, pipeline: PipelineOptions) -> list[str]:
    from thinwire.pipeline.schedules import splits_backward

    numbers = pipeline.num_stages, pipeline.num_processes, pipeline.num_microbatches
    if training.recompute == "none" or not splits_backward(pipeline.schedule, *numbers):
        return []
    return [
        f"training.recompute must be none for {pipeline.schedule}, which splits the backward: each weight would "
        f"compute its block again; got {training.recompute}; 1f1b and interleaved-1f1b have whole backwards"
    ]
