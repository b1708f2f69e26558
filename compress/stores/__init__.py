"""Where feedback keeps its buffers: in memory, or in a file on the stage's own disk."""
