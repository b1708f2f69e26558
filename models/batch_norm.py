"""Batch norm under micro-batches: which modules it concerns, and when a micro-batch is too small for it.

In training a batch norm sees one micro-batch at a time: it normalises by that one's mean and variance, and moves its
running statistics once a micro-batch. Nothing is gathered over the batch, for the stage sees the next micro-batch only
after it has sent this one on.
"""

from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from thinwire.models.layers import Layer

FEWEST_SAMPLES = 8
"""Micro-batches of fewer samples are warned about. Pixels of one image are alike, so what counts is the samples, not
the values per channel: ResNet-50 on ImageNet errs in 23.6 % of images with statistics over 32 of them, 23.7 with 16,
24.8 with 8, 27.3 with 4 and 34.7 with 2 (Wu and He, Group Normalization, arXiv 1803.08494)."""


def batch_norms(layers: Iterable[nn.Module]) -> tuple[str, ...]:
    """The full names of those batch norms in the layers that would normalise by a micro-batch's statistics."""
    return tuple(
        ".".join(filter(None, (full_name, name)))
        for layer in layers
        if isinstance(layer, Layer)
        for full_name, part in layer.parts.items()
        for name, module in part.named_modules()
        if isinstance(module, _BatchNorm) and module.training
    )


def batch_norm_warning(names: Sequence[str], microbatch_size: int) -> str | None:
    """A sentence where a model has batch norms, by their full names, and a micro-batch is too small for them."""
    if not names or microbatch_size >= FEWEST_SAMPLES:
        return None
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"batch norm {names[0]}{others}: statistics over fewer than {FEWEST_SAMPLES} samples are noisy and cost "
        f"accuracy, got microbatch_size {microbatch_size}; raise pipeline.microbatch_size (lower num_microbatches for "
        "the same batch), or use a norm within each sample"
    )
