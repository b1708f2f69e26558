"""What a user can choose about the pipeline, as dataclasses: the fields of a recipe, with their checks.

Large libraries are imported inside the checks, so `thinwire train --help` needs no torch.
"""

from thinwire.pipeline.options.clients import ClientOptions
from thinwire.pipeline.options.compression import BoundaryOptions, CompressionOptions, split_pair
from thinwire.pipeline.options.pipeline import PipelineOptions, WireOptions
from thinwire.pipeline.options.replicas import ReplicaOptions, SyncOptions
from thinwire.pipeline.options.training import CheckpointOptions, DebugOptions, OptimizerOptions, TrainingOptions

__all__ = [
    "BoundaryOptions",
    "CheckpointOptions",
    "ClientOptions",
    "CompressionOptions",
    "DebugOptions",
    "OptimizerOptions",
    "PipelineOptions",
    "ReplicaOptions",
    "SyncOptions",
    "TrainingOptions",
    "WireOptions",
    "split_pair",
]
