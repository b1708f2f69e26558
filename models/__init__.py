"""Models as lists of layers, their cut into stages, data, batches and losses.

This file imports nothing, so a process that needs only data imports nothing else. The modules, lowest first:

- `errors`, `seed`, `digest`, `file_mode`, `options`, `tensors`, `precision`, `recompute`, `hub`
- `layers` (the shape of every model), `checkpoint`, `compiled`, `architectures/` (`conversion`, `library`,
  `parity`, `vision`, `sequential`), and `model`, which picks one of them
- `batch_norm`, `costs`, `partition`
- `tasks`, and `data/`: `options`, `parts`, the sources (`files`, `own`, `tables`, joined in `sources`),
  `tokenizer`, `samples`, their kinds (`texts`, `chats`, `pairs`, `images`), `sampler`, `mixture`, `outline`,
  `clients`, and `load`, which joins them
"""
