"""Models as lists of layers, their cut into stages, data, batches and losses.

Nothing is imported here, so that a process that needs only data imports nothing else. The modules, lowest first:
`errors`, `seed`, `digest`, `file_mode`; `layers` (the shape of every model), `checkpoint`, `chain`, `pieces`,
`families`, `vision`, `vision_weights`, `sequential`, and `model`, which picks one of them; `batch_norm`, `costs`,
`partition`; `sampler`, `tasks`; `sources`, `tokenizer`, the samples made of them (`texts`, `pairs`, `images`), and
`data`, which joins them.
"""
