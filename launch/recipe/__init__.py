"""Reading a recipe: its fields, its YAML, and the options of a command line."""
