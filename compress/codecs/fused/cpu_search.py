"""The passes of searches for a scale, on a CPU with Numba; cpu.py compares their scales with the eager code's."""

import numpy as np
import torch
from torch import Tensor

from thinwire.compress.codecs.clip import POOLED, Maxima, Passes, sample_step
from thinwire.compress.codecs.fused.arithmetic import nonzero


class KernelMaxima(Maxima):
    """Maxima that are compared with a scale in one pass."""

    def beyond(self, scale: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of what each block's maxima exceed its `scale` by, and how many do; the sum is torch's."""
        from thinwire.compress.codecs.fused import cpu_search_kernels

        count = torch.empty_like(scale)
        cpu_search_kernels.beyond(self.rows.numpy(), *_arrays(scale), room.numpy(), *_arrays(count))
        return room.sum(1, keepdim=True), count


class KernelPasses(Passes):
    """One pass each over `values` [1, count, inner], float32 and contiguous."""

    def maxima(self, values: Tensor) -> Maxima:
        """The largest of each 8 magnitudes, with the ends of each block."""
        from thinwire.compress.codecs.fused import cpu_search_kernels

        _, count, inner = values.shape
        rows = torch.zeros(count, inner // POOLED + inner % POOLED, dtype=torch.float32)
        largest, least, most = torch.empty(3, count, 1, dtype=torch.float32)
        cpu_search_kernels.maxima(values.squeeze(0).numpy(), rows.numpy(), *_arrays(largest, least, most))
        return KernelMaxima(rows, largest, least, most, inner)

    def ends(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest value of each block."""
        from thinwire.compress.codecs.fused import cpu_search_kernels

        least, most = torch.empty(2, values.shape[1], 1, dtype=torch.float32)
        cpu_search_kernels.ends(values.squeeze(0).numpy(), *_arrays(least, most))
        return least, most

    def missed(self, values: Tensor, steps: Tensor, shifts: Tensor, half: int) -> Tensor:
        """What grids that hold zero, or are half a step lower, lose of each block's sample."""
        from thinwire.compress.codecs.fused import cpu_search_kernels

        step = sample_step(values.shape[2])
        out = torch.empty(len(steps), 1, values.shape[1], -(-values.shape[2] // step), dtype=torch.float32)
        grids = (part.view(len(steps), -1).contiguous().numpy() for part in (-nonzero(steps), shifts, steps))
        cpu_search_kernels.missed(values.squeeze(0).numpy(), step, *grids, np.float32(half), out.squeeze(1).numpy())
        return out


def _arrays(*numbers: Tensor) -> list[np.ndarray]:
    return [part.view(-1).numpy() for part in numbers]
