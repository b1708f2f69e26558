"""Data: where it comes from, how it becomes numbered samples, and in what order they are trained on."""
