"""Data: its sources, how it becomes numbered samples, and the order of samples in training."""
