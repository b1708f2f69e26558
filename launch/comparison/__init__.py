"""Finished runs and tables of numbers: read, compared, and shown on one page."""
