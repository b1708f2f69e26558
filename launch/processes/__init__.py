"""The processes of a run: those that start and watch others, and those that hold stages."""
