"""`thinwire study`: many runs of one recipe, kept in one folder, compared with published numbers, and judged."""
