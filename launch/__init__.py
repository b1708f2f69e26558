"""What a person runs: the command line, recipes, starting the stages of a run, and what it leaves behind."""
