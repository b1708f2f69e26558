"""Times of the work in all processes of a pipeline, on one clock: spans of work, and the trace of the last steps."""
