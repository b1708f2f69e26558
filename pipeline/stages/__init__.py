"""torch's PipelineStage with compressed boundaries."""
