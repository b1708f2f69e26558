"""`thinwire bench codecs`: bits, noise and speed of each codec."""
