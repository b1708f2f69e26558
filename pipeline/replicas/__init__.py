"""Replicas of a stage: after the passes of a step they exchange the gradients of their weights, in frames."""
