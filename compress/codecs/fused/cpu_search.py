"""The passes of searches for a scale, on a CPU with Numba; cpu.py compares their scales with the eager code's."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from thinwire.compress.codecs.clip import Gaussian, Passes, sample_step, slopes
from thinwire.compress.codecs.fused.arithmetic import nonzero


class KernelPasses(Passes):
    """One pass each over `values` [1, count, inner], float32 and contiguous."""

    def ends(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest value of each block."""
        from thinwire.compress.codecs.fused import cpu_search_kernels

        least, most = torch.empty(2, values.shape[1], 1, dtype=torch.float32)
        cpu_search_kernels.ends(values.squeeze(0).numpy(), *_arrays(least, most))
        return least, most

    def least_square_scales(
        self, values: Tensor, bits: int, grids: Sequence[Gaussian]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The ends of each block, and its scale for each of `grids`."""
        from thinwire.compress.codecs.fused import cpu_search_kernels

        _, count, inner = values.shape
        pairs = np.array([slopes(bits, grid, inner) for grid in grids])
        least, most = torch.empty(2, count, 1, dtype=torch.float32)
        out = torch.empty(len(grids), count, 1, dtype=torch.float32)
        cpu_search_kernels.least_square_scales(
            values.squeeze(0).numpy(), pairs, *_arrays(least, most), out.squeeze(2).numpy()
        )
        return least, most, list(out)

    def losses(self, values: Tensor, steps: Tensor, shifts: Tensor, half: int) -> Tensor:
        """What grids that hold zero, or are half a step lower, lose of each block's sample."""
        from thinwire.compress.codecs.fused import cpu_search_kernels

        sample, out = values.squeeze(0)[:, :: sample_step(values.shape[2])], np.empty(steps.shape[:2], np.int32)
        factors, lower = (part.squeeze(2).numpy() for part in (-1 / nonzero(steps), shifts))
        cpu_search_kernels.losses(sample.contiguous().numpy(), factors, lower, np.float32(half), out)
        return torch.from_numpy(out).unsqueeze(2).double().mul_(steps.double().square_())


def _arrays(*numbers: Tensor) -> list[np.ndarray]:
    return [part.view(-1).numpy() for part in numbers]
