"""What a run logs: the metrics of each step and evaluation, and TensorBoard's curves of them."""
