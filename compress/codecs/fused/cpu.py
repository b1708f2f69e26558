"""The parts of tensors that one kernel encodes and one decodes on a CPU: cpu_kernels.py, if Numba is installed.

The eager code is what the kernels must equal, and does everything else: short parts, short blocks, blocks that lie
apart, noise, more than a few threads, and whatever torch traces or compiles.
"""

import warnings
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.compress.codecs.coding.bits import packed_size
from thinwire.compress.codecs.fused.arithmetic import CodeRule
from thinwire.compress.codecs.fused.cpu_search import KernelPasses
from thinwire.compress.codecs.granularity import Blocks
from thinwire.compress.codecs.grid import Grid
from thinwire.compress.codecs.quantizer import GridQuantizer
from thinwire.errors import ThinwireWarning

LEAST_ELEMENTS = 1 << 18
"""A process whose tensors are all shorter never loads the kernels: that takes a second, and below this they save less
than 1 ms a message."""
_LEAST_BLOCK = 16
_MOST_THREADS = 2
"""The kernels use one thread; with more than this, torch's are as fast together."""


def covers(grid: Grid, values: Tensor) -> bool:
    """Whether kernels encode and decode `values` [outer, count, inner]."""
    return takes(values) and _work(grid)


def takes(values: Tensor) -> bool:
    """Whether `values` [outer, count, inner] are for kernels: float32 on a CPU, not traced."""
    return (
        type(values) is Tensor
        and values.dtype == torch.float32
        and values.numel() >= LEAST_ELEMENTS
        and values.device.type == "cpu"
        and values.shape[0] == 1
        and values.shape[2] >= _LEAST_BLOCK
        and not torch.compiler.is_compiling()
        and torch.get_num_threads() <= _MOST_THREADS
        and values.is_contiguous()
    )


def encode(grid: Grid, values: Tensor, scales: Tensor | None, out: Tensor) -> Tensor:
    """Write the packed codes of `values`, and return their scales, which are measured if not given."""
    from thinwire.compress.codecs.fused import cpu_kernels

    if scales is None and grid.share is None:
        scales = grid.measure_by(KernelPasses(), values)
    count, first, second = values.shape[1], 1.0, 0.0
    if scales is None:
        rule = CodeRule.RANGE if grid.scale_dtype == torch.float32 else CodeRule.FLOOR
        measured, divisors, shifts = torch.zeros(3, count, dtype=torch.float32)
    else:
        coding = grid.coding(scales)
        assert coding is not None, "covers asks for it"
        rule, divisors, shifts = coding.rule, coding.divisors, _or_zeros(coding.shifts, count)
        measured, first, second = torch.empty(0, dtype=torch.float32), coding.first, coding.second
    cpu_kernels.encode(
        values.squeeze(0).numpy(), int(rule), np.float32(grid.share or 1.0), _array(measured), _array(divisors),
        _array(shifts), np.float32(first), np.float32(second), grid.bits, out.numpy(),
    )  # fmt: skip
    if scales is not None:
        return scales
    return measured.bfloat16().unsqueeze(1) if rule == CodeRule.FLOOR else torch.stack([shifts, measured], 1)


def decode(grid: Grid, packed: Tensor, scales: Tensor, values: Tensor) -> None:
    """Write the values of packed codes into `values`."""
    from thinwire.compress.codecs.fused import cpu_kernels

    valuing = grid.valuing(scales)
    assert valuing is not None, "covers asks for it"
    shifts = _or_zeros(valuing.shifts, len(scales))
    table = valuing.factors if valuing.table is None else valuing.table
    cpu_kernels.decode(
        packed.numpy(), int(valuing.rule), np.float32(valuing.first), np.float32(valuing.second),
        _array(table), _array(valuing.factors), _array(shifts), grid.bits, values.squeeze(0).numpy(),
    )  # fmt: skip


def _or_zeros(shifts: Tensor | None, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float32) if shifts is None else shifts


def _array(numbers: Tensor) -> NDArray[np.float32]:
    """The memory of a tensor, so that kernels write into it if it was contiguous."""
    array: NDArray[np.float32] = numbers.contiguous().view(-1).numpy()
    return array


@cache
def _work(grid: Grid) -> bool:
    """Whether the kernels know this grid and work here, tried once beside the eager code."""
    if grid.stochastic or not find_spec("numba"):
        return False
    sample = torch.linspace(-3, 2, 64 * 64, dtype=torch.float32).sin().view(1, 64, 64)
    scales = grid.measure(sample)
    if grid.coding(scales) is None or grid.valuing(scales) is None:
        return False
    try:
        reason = "" if _agree(grid, sample, scales) else "they gave other bytes than the eager code"
    except Exception as error:  # a library that is missing, a processor that LLVM does not know, a cache folder
        reason = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    if reason:
        warnings.warn(
            f"the kernels for the CPU do not work here, so codecs are slower: {reason}", ThinwireWarning, stacklevel=2
        )
    return not reason


def _agree(grid: Grid, sample: Tensor, scales: Tensor) -> bool:
    """Whether kernels and eager code give the same scales, codes and values."""
    _, count, inner = sample.shape
    eager = GridQuantizer(grid, lambda shape: Blocks(count * inner, 1, count, inner))
    part = next(eager.blocks(sample.shape).parts(count * inner))
    packed = torch.zeros(3, packed_size(count * inner, grid.bits), dtype=torch.uint8)
    eager.write_part(part, sample, scales, None, packed[0])
    measured = encode(grid, sample, None, packed[1])
    encode(grid, sample, scales, packed[2])
    values, others = torch.zeros(2, 1, count, inner, dtype=torch.float32)
    eager.read_part(packed[0], scales, values, values.numel())
    decode(grid, packed[0], scales, others)
    same_codes = torch.equal(packed[0], packed[1]) and torch.equal(packed[0], packed[2])
    return same_codes and torch.equal(measured, scales) and torch.equal(values, others)
