"""Error feedback in one pass on a CPU: cpu_error_kernels.py, if Numba is installed.

A message, its payload and the new error by steps of their own read or write all of a tensor eleven times; this, three
times and the payload. Grids whose scale the kernel cannot measure take those steps, as does all that cpu.py leaves to
the eager code.
"""

import warnings
from functools import cache

import numpy as np
import torch
from torch import Tensor

from thinwire.compress.codec import Key
from thinwire.compress.codecs.fused import cpu
from thinwire.compress.codecs.fused.arithmetic import CodeRule
from thinwire.compress.codecs.granularity import Blocks
from thinwire.compress.codecs.grid import Grid
from thinwire.compress.codecs.quantizer import GridQuantizer
from thinwire.errors import ThinwireWarning


def covers(grid: Grid, values: Tensor) -> bool:
    """Whether the kernel takes blocks of `values` [outer, count, inner], and of errors that lie in the same way."""
    return grid.share is not None and cpu.covers(grid, values) and _works(grid)


def encode(grid: Grid, values: Tensor, error: Tensor, decay: float, out: Tensor) -> Tensor:
    """Write the packed codes of u = values + decay * error, and u - C(u) into `error`; return the scales."""
    from thinwire.compress.codecs.fused import cpu_error_kernels

    rule = CodeRule.RANGE if grid.scale_dtype == torch.float32 else CodeRule.FLOOR
    scales, shifts = torch.zeros(2, values.shape[1], dtype=torch.float32)
    cpu_error_kernels.encode(
        values.squeeze(0).numpy(), error.squeeze(0).numpy(), np.float32(decay), int(rule), np.float32(grid.share),
        grid.bits, scales.numpy(), shifts.numpy(), out.numpy(),
    )  # fmt: skip
    return torch.stack([shifts, scales], 1) if rule == CodeRule.RANGE else scales.bfloat16().unsqueeze(1)


@cache
def _works(grid: Grid) -> bool:
    """Whether the kernel works here, tried once beside the eager code."""
    try:
        reason = "" if _agrees(grid) else "it gave another payload or error than the eager code"
    except Exception as error:  # as in cpu.py
        reason = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    if reason:
        warnings.warn(
            f"the kernel for feedback does not work here, so it is slower: {reason}", ThinwireWarning, stacklevel=2
        )
    return not reason


def _agrees(grid: Grid) -> bool:
    """Whether kernel and eager code give the same payload and errors."""
    values = torch.linspace(-3, 2, 64 * 64, dtype=torch.float32).sin().view(1, 64, 64)
    errors = torch.linspace(2, -1, 2 * 64 * 64, dtype=torch.float32).cos().mul_(0.1).view(2, 1, 64, 64)
    eager = GridQuantizer(grid, lambda shape: Blocks(64 * 64, 1, 64, 64))
    size, key = grid.scales_size(64), Key(0, 0, "gradients", "train", 0, 0)
    payloads = torch.zeros(2, eager.nbytes(values.shape), dtype=torch.uint8)
    for error, decay in zip(errors, (1.0, 0.95), strict=True):
        message = values + error if decay == 1 else torch.mul(error, decay).add_(values)
        eager.encode(message, payloads[0], key)
        decoded = torch.empty_like(message)
        eager.decode(payloads[0], decoded)
        payloads[1, :size] = grid.pack_scales(encode(grid, values, error, decay, payloads[1, size:]))
        if not torch.equal(payloads[0], payloads[1]) or not torch.equal(error, message.sub_(decoded)):
            return False
    return True
