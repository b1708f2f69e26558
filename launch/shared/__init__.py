"""Helpers that several commands use. Nothing here knows a command."""
