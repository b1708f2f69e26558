"""Recipes as files of a test."""


def written(folder, text, name="mine.yaml"):
    """Write a recipe into a folder; its path."""
    path = folder / name
    path.write_text(text)
    return path
