"""Seconds and bytes: meters, clocks of processes, traces."""
