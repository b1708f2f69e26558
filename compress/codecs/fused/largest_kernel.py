"""The Triton kernel of topk: marks the k largest of each row. Imported only where a tensor is on a GPU.

A program holds a row in registers, and finds its k-th largest integer bit by bit: a bit belongs to it if k integers of
the row are as large as what is found so far with that bit. So the row is read once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def mark(integers: Tensor, marks: Tensor, mask: int, k: int, bits: int) -> None:
    """Write whether each of `integers & mask` [N, n], contiguous, is among the `k` largest of its row.

    The first of equals are. The numbers have no sign and at most `bits` bits.
    """
    samples, n = integers.shape
    columns = triton.next_power_of_2(n)
    _mark[(samples, 1)](
        integers, marks.view(torch.uint8), n, k, mask, bits, columns, num_warps=4 if columns <= 2048 else 8
    )


@triton.jit
def _mark(x, marks, n, k, mask, BITS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.arange(0, COLUMNS)
    inside = columns < n
    places = tl.program_id(0).to(tl.int64) * n + columns
    values = tl.load(x + places, mask=inside, other=0).to(tl.int32) & mask
    values = tl.where(inside, values, -1)
    least = n * 0
    for bit in range(BITS):
        trial = least | (1 << (BITS - 1 - bit))
        least = tl.where(tl.sum((values >= trial).to(tl.int32), axis=0) >= k, trial, least)
    above, equal = values > least, values == least
    missing = k - tl.sum(above.to(tl.int32), axis=0)
    first = equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= missing)
    tl.store(marks + places, (above | first).to(tl.uint8), mask=inside)
