"""What crosses the boundaries between stages: channels, frames, their ends, and the wire that connects them."""
