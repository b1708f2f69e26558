"""What the processes of a pipeline did when, on one clock: spans of work, and the trace of the last steps."""
