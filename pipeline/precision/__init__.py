"""What 16 bits need beside the arithmetic itself."""
