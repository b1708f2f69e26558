"""The folder of a run: whose it is, and the weights, the model's files and the exports in it."""
