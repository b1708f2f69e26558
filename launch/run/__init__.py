"""A run as one process executes it: a trainer, and parts that keep their own state."""
