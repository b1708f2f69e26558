"""Checkpoints: what a stage's state is, and how it is written and read."""
