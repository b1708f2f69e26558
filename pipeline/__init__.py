"""One process of a pipeline: stages with compressing boundaries, schedules and training.

`CompressedStage` takes the place of torch.distributed.pipelining.PipelineStage. A `Wire` connects the stages of a
process.
"""

from typing import TYPE_CHECKING

from thinwire.errors.imports import on_demand

if TYPE_CHECKING:
    from thinwire.compress.buffers import SlotCounts
    from thinwire.pipeline.errors import PipelineError
    from thinwire.pipeline.options import BoundaryOptions, CompressionOptions, WireOptions
    from thinwire.pipeline.saving.stateful import SavedStages
    from thinwire.pipeline.stages.compressed_stage import CompressedStage
    from thinwire.pipeline.stages.traced import stage_from
    from thinwire.pipeline.wire.passes import Pass
    from thinwire.pipeline.wire.wire import Wire, compressed
else:
    __getattr__ = on_demand(
        __name__,
        {
            "thinwire.compress.buffers": ["SlotCounts"],
            "thinwire.pipeline.errors": ["PipelineError"],
            "thinwire.pipeline.options": ["BoundaryOptions", "CompressionOptions", "WireOptions"],
            "thinwire.pipeline.wire.passes": ["Pass"],
            "thinwire.pipeline.saving.stateful": ["SavedStages"],
            "thinwire.pipeline.stages.compressed_stage": ["CompressedStage"],
            "thinwire.pipeline.stages.traced": ["stage_from"],
            "thinwire.pipeline.wire.wire": ["Wire", "compressed"],
        },
    )

__all__ = [
    "BoundaryOptions",
    "CompressedStage",
    "CompressionOptions",
    "Pass",
    "PipelineError",
    "SavedStages",
    "SlotCounts",
    "Wire",
    "WireOptions",
    "compressed",
    "stage_from",
]
