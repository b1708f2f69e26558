"""From a recipe to stages: which model, which data, where the model is cut, and what all processes agree on."""
