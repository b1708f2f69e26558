"""Where tensors live and move: the CPU or a card, streams and events, and the way of frames between card and host."""
