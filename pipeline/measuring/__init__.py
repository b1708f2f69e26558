"""Seconds and bytes: meters, clocks of processes."""
