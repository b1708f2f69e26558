"""The training loop, and what a step consists of."""
