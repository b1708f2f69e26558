"""What every process of a run executes: from the recipe to the trainer, and what a run leaves behind."""
