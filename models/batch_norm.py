"""Batch norm under micro-batches: find the modules and their statistics, and warn if a micro-batch is too small.

In training a batch norm sees one micro-batch at a time. It normalises by the mean and variance of that micro-batch, and
updates its running statistics after each one. Statistics of the whole batch are not possible: a stage sends one
micro-batch on before it sees the next.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from thinwire.models.layers import Stage

FEWEST_SAMPLES = 8
"""A smaller micro-batch gives a warning. Samples count here, not values per channel, because pixels of one image are
alike. The error of ResNet-50 on ImageNet is 23.6 % with statistics over 32 images, 23.7 with 16, 24.8 with 8, 27.3 with
4 and 34.7 with 2 (Wu and He, Group Normalization, arXiv 1803.08494)."""


def batch_norms(stage: Stage) -> tuple[str, ...]:
    """The full names of the batch norms in a stage that train: they normalise by a micro-batch's statistics."""
    return tuple(
        name for name, module in stage.full_modules().items() if isinstance(module, _BatchNorm) and module.training
    )


def running_statistics(stage: Stage) -> dict[str, Tensor]:
    """The running statistics that a stage updates while it trains, by name in the unsplit model; its own buffers.

    Counts of micro-batches are int64, the others are float.
    """
    return {
        f"{full_name}.{name}" if full_name else name: buffer
        for full_name, norm in stage.full_modules().items()
        if isinstance(norm, _NormBase) and norm.training
        for name, buffer in norm.named_buffers(recurse=False)
    }


def batch_norm_warning(names: Sequence[str], microbatch_size: int) -> str | None:
    """A warning if the micro-batch is too small for these batch norms; None if it is not, or there are none."""
    if not names or microbatch_size >= FEWEST_SAMPLES:
        return None
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"batch norm {names[0]}{others}: statistics over fewer than {FEWEST_SAMPLES} samples are noisy and cost "
        f"accuracy, got microbatch_size {microbatch_size}; raise pipeline.microbatch_size (and lower num_microbatches "
        "to keep the batch), or use a norm within each sample"
    )
