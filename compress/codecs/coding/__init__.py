"""Coding: codes and symbols in as few bytes as they need."""
