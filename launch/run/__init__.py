"""The code that every process of a run executes: from the recipe to the trainer, and the files that a run writes."""
