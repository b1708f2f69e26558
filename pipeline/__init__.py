"""One process of a pipeline: stages with compressing boundaries, schedules and training.

`CompressedStage` takes the place of torch.distributed.pipelining.PipelineStage. A `Wire` connects the stages of a
process.
"""

from thinwire.compress import SlotCounts
from thinwire.pipeline.errors import PipelineError
from thinwire.pipeline.options import BoundaryOptions, CompressionOptions, WireOptions
from thinwire.pipeline.passes import Pass
from thinwire.pipeline.stage import CompressedStage
from thinwire.pipeline.wire import Wire

__all__ = [
    "BoundaryOptions",
    "CompressedStage",
    "CompressionOptions",
    "Pass",
    "PipelineError",
    "SlotCounts",
    "Wire",
    "WireOptions",
]
