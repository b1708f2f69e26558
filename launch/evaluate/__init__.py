"""`thinwire eval`: the held-out scores of a model."""
