"""Compiling the stages of a run before its first step."""
