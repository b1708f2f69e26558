"""Selection on a GPU: the places of the k largest integers of a row, by a threshold. Of equals the first count.

    threshold   the k-th largest of each row: by radix select, or bit by bit in a kernel that holds the row in registers
    marks       what is above it, and the first of those that equal it
    places      those of the marks, ascending

Nothing is sorted, the host looks at nothing, and the places are those that NumPy finds on a CPU (selection.py).
"""

import torch
from torch import Tensor

from thinwire.compress.codecs.fused.trial import is_gpu, work

_BITS = {torch.int32: 31, torch.int16: 15}
"""Bits of an integer without its sign, for what the kernel takes."""


def places_of_largest(integers: Tensor, mask: int, k: int) -> Tensor:
    """The places of the `k` largest `integers & mask` of each row [N, n]: int64 [N, k], counted over all rows.

    `k` is at least 1 and below n.
    """
    samples, n = integers.shape
    if covers(integers.dtype, mask, n) and _works_on(integers.device, integers.dtype):
        with torch.cuda.device(integers.device):
            marks = marks_by_kernel(integers, mask, k)
    else:
        marks = marks_of_largest(integers, mask, k)
    places: Tensor = torch.nonzero_static(marks.reshape(-1), size=samples * k)
    return places.view(samples, k)


def marks_of_largest(integers: Tensor, mask: int, k: int) -> Tensor:
    """Whether each of `integers` [N, n] is one of the `k` largest of its row: bool [N, n]."""
    masked, n = integers & mask, integers.shape[1]
    # with sorted=False, topk on a GPU is a radix select; its places are not used, because of equals it takes any
    if 2 * k <= n:
        least = masked.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    else:
        least = masked.topk(n - k + 1, dim=1, largest=False, sorted=False).values.amax(1, keepdim=True)
    above, equal = masked > least, masked == least
    missing = k - above.sum(1, keepdim=True)
    return above | (equal & (equal.cumsum(1, dtype=torch.int32) <= missing))


def covers(dtype: torch.dtype, mask: int, n: int) -> bool:
    """Whether the kernel takes rows of `n` such integers: a program holds one, and compares numbers of no sign."""
    return dtype in _BITS and mask > 0 and 0 < n <= 16384


def marks_by_kernel(integers: Tensor, mask: int, k: int) -> Tensor:
    """As `marks_of_largest`, by the kernel."""
    from thinwire.compress.codecs.fused import largest_kernel

    marks = torch.empty(integers.shape, dtype=torch.bool, device=integers.device)
    largest_kernel.mark(integers.contiguous(), marks, mask, k, _BITS[integers.dtype])
    return marks


def _works_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel works on this device."""
    return is_gpu(device) and work("triton", f"topk on {device}", _agrees, device, dtype)


def _agrees(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernel and tensor code mark the same places of a small tensor."""
    with torch.cuda.device(device):
        x = torch.linspace(-9, 7, 40 * 100, dtype=torch.float32, device=device).sin().view(40, 100)
        mask = (1 << _BITS[dtype]) - 1
        integers = x.round(decimals=1).to(torch.float32 if dtype == torch.int32 else torch.bfloat16).view(dtype)
        return torch.equal(*(make(integers, mask, 13) for make in (marks_by_kernel, marks_of_largest)))
