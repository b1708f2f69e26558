"""What kernels do with a codebook on a CPU: codebook_kernels.py, which give what the torch operations give."""

import numpy as np
import torch
from torch import Tensor

from thinwire.compress.codecs.fused.trial import work
from thinwire.compress.entries import EXTRA, update


def cover(*tensors: Tensor) -> bool:
    """Whether kernels work on these: contiguous tensors of a CPU that torch does not trace."""
    plain = all(type(each) is Tensor and each.device.type == "cpu" and each.is_contiguous() for each in tensors)
    return plain and not torch.compiler.is_compiling() and work("numba", "the codebook", _agree)


def unpredicted(values: Tensor, scales: Tensor, table: Tensor, last: int, entries: Tensor) -> Tensor:
    """The integers, int16 [n], of what entries leave of float32 values [n]; too large ones make an entry 0."""
    from thinwire.compress.codecs.fused import codebook_kernels

    integers = np.empty(len(values), np.int16)
    arrays = (each.numpy() for each in (values, scales, table))
    codebook_kernels.unpredicted(*arrays, np.float32(last), entries.numpy(), integers)
    return torch.from_numpy(integers)


def values(integers: Tensor, scales: Tensor, table: Tensor, entries: Tensor, out: Tensor) -> None:
    """Write integers, with what entries predict, times the scales of their rows into float32 `out` [n]."""
    from thinwire.compress.codecs.fused import codebook_kernels

    codebook_kernels.values(*(each.numpy() for each in (integers, scales, table, entries, out)))


def learn(table: Tensor, entries: Tensor, integers: Tensor) -> None:
    """Update a table by a message."""
    from thinwire.compress.codecs.fused import codebook_kernels

    codebook_kernels.learn(table.numpy(), entries.numpy(), integers.numpy())


def _agree() -> bool:
    """Whether kernels and torch operations learn alike."""
    width = 24
    tables = [torch.zeros(7, width + EXTRA) for _ in range(2)]
    for message in range(4):
        integers = (torch.linspace(-9, 7, 12 * width).sin() * (20 - message)).round().to(torch.int16).view(12, width)
        entries = torch.arange(12) * message % 7
        update(tables[0], entries, integers)
        learn(tables[1], entries, integers)
    return torch.equal(*tables)
