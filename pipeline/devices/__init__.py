"""Where tensors live and move: the CPU or a GPU, streams and events, and the way of frames between GPU and host."""
