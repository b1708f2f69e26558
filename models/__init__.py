"""What is trained: models as lists of layers, their cut into stages, data, batches and losses.

Nothing is imported here, so that a process that needs data alone pays for nothing else. The modules, lowest first:
`errors`, `seed`, `layers` (the shape of every model), `gpt2`, `partition`, `data`, `sampler`, `tasks`, `digest`.
"""
