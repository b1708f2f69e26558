"""Workloads whose stages are all alike."""

import torch

from thinwire.launch.timing.workload import Workload


def uniform(name, *, num_stages, num_microbatches, forward, backward, shape):
    """A workload of equal stages with one float32 tensor as output, of `shape`: its first dimension is samples."""
    example = torch.empty(shape, device="meta", requires_grad=True)
    return Workload(
        name=name,
        num_microbatches=num_microbatches,
        microbatch_size=shape[0],
        forward=(forward,) * num_stages,
        backward=(backward,) * num_stages,
        boundaries=((example,),) * (num_stages - 1),
    )
